"""The page: the API's resources in a browser.

The running process renders the page, with the service of the API. The page consists of plain links
and forms, and works without JavaScript; a small script keeps an open page up to date.

text.py       numbers in readable units                                   pure
forms.py      the settings of a model as a form, and back                 pure
view.py       status, draft and plan in the form of templates             pure
render.py     templates and static files, read once
frame.py      shared by all pages: user, CSRF, errors, notes
overview.py   sources, progress, and problems
attention.py  problems with their runbook, steps and forms                pure
manual.py     the documentation, for links from a problem to its runbook
bulk.py       acts on many sources: a page to confirm, and the outcomes
table.py      a table: both sides, errors, quarantine, requests
tenants.py    the databases of each group, and how their definitions differ
past.py       recent events; conflicts and quarantine of all tables
mapping.py    the draft: databases, urls, tables
adding.py     a source in three steps
changes.py    plan, apply, discard, history
routes.py     all routes, also the routes without a login
"""
