"""The routes of ``/api``, and the gate before these routes.

gate.py       credentials, size of a request, headers for browsers
errors.py     the status of an error, and the shape of its answer
mapping.py    databases, urls, tables, settings, audit
draft.py      draft, plan, apply, export, import
servers.py    status, discovery, acts, quarantine, events
tenants.py    list, add, remove, purge, drift
sessions.py   login, logout, cookies
router.py     all routes in one application
"""
