"""What the commands do, apart from reading their arguments."""
