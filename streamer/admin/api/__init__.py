"""The routes of ``/api``, and the gate before all of them.

gate.py            credentials, size of a request, headers for browsers
error_answers.py   the status of an error, and the shape of its answer
mapping_routes.py  databases, urls, tables, settings, audit
draft_routes.py    draft, plan, apply, export, import
server_routes.py   status, discovery, requests, quarantine, events
fleet_routes.py    many sources: list, history, requests
tenant_routes.py   list, add, remove, purge, drift
login_routes.py    login, logout, cookies
router.py          all routes in one application
"""
