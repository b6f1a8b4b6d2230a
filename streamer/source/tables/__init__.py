"""Further facts about the tables of a source."""
