"""The page: the API's resources in a browser.

The running process renders the page from the service of the API. The page consists of plain links
and forms, and works without JavaScript; a small script updates an open page. `page_routes.py`
installs the pages, and `page_frame.py` defines the parts of all pages.
"""
