"""The page: the API's resources in a browser.

The running process renders it, from the same service. It consists of plain links and forms, so it
works without JavaScript; a small script keeps an open page up to date. `page_routes.py` installs
the pages, and `page_frame.py` has the parts of all pages.
"""
