-- Every change removes audit rows that are too old, and finds them by this index.
create index audit_at on audit (at);
