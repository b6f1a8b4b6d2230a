"""The page: what the API offers, for people in a browser.

Rendered here, by the same process and from the same service; plain links and forms, so it all works
without JavaScript. What little there is of that keeps an open page up to date.

text.py       numbers as people read them                                              pure
forms.py      the settings of a model as a form, and back                              pure
view.py       status, draft and plan as templates want them                            pure
render.py     templates and static files, read once
frame.py      what all pages have: who asks, CSRF, errors, notes
overview.py   what streams, how far it is, what needs somebody
attention.py  problems with their runbook, command and forms                          pure
manual.py     the documentation, for links from a problem to its runbook
table.py      one table: both sides, errors, quarantine, requests
past.py       recent events; the changes in quarantine of all tables
mapping.py    the draft: databases, urls, tables
adding.py     a source in three steps
changes.py    plan, apply, discard, what was changed
routes.py     all of them, and what needs no login
"""
