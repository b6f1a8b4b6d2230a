-- The bookkeeping of streamer, in the target, so that a transaction commits bookkeeping and data
-- together.

create table streamer.source (
    id bigint generated always as identity primary key,
    database text not null,
    sid text check (sid <> ''),
    system_identifier text,
    timeline integer,
    -- The end of each ancestor of the timeline, as in its history file: a line 'timeline LSN' for
    -- each.
    timeline_history text,
    -- The OID of the source's database, because the databases of a server share its system
    -- identifier.
    database_oid bigint,
    slot text not null,
    publication text not null,
    state text not null default 'starting'
        check (state in ('starting', 'streaming', 'waiting', 'stopped', 'error')),
    error text,
    -- The code of `error`, which decides its runbook: see the reference of error codes.
    error_code text,
    -- The operator's next step: text, commands and SQL of `streamer.errors.remedies`.
    error_remedy jsonb,
    -- The reason why the start of the source waits, as text.
    waiting_for text,
    -- The number of rounds of copies that share `sync.rows_per_second`.
    copy_rounds integer not null default 1 check (copy_rounds > 0),
    -- The position to acknowledge, which streamer stores before it reports the position to the
    -- source. So the slot is never ahead, unless this database went back in time or a foreign
    -- client moved the slot.
    acknowledged_lsn pg_lsn not null default '0/0',
    -- The target shows all commits of the source up to this time, by the target's clock.
    visible_time timestamptz,
    -- The process that streams from this source, or that last did.
    holder text,
    -- The implementation of the hot path that this process uses: compiled or pure.
    implementation text,
    -- A transaction that is in the target: {"end_lsn", "xid", "commit_time"}. If the source sends
    -- the transaction again, streamer recognizes the source's history.
    last_transaction jsonb,
    -- The WAL that the source retains for streamer, and the journal of its changes, for `status`.
    -- {"throttled"} tells copies whether to slow down.
    backlog jsonb,
    -- The time from the last heartbeat's commit at the source until all earlier changes were
    -- durable here. Then the time since which a heartbeat is overdue.
    heartbeat_seconds double precision,
    heartbeat_since timestamptz,
    -- The session that takes the source's advisory lock writes a token. Sessions with an earlier
    -- token have lost the right to the source.
    lock_token text
);
create unique index source_key on streamer.source (database, coalesce(sid, ''));

-- Processes of `streamer run` that share the sources. The session that holds the locks of a process's
-- sources holds the advisory lock of its row, too; without that lock the process has ended.
create table streamer.replica (
    id integer generated always as identity primary key,
    -- Host and pid.
    name text not null,
    backend_pid integer not null,
    -- The version of streamer that the process runs.
    version text not null,
    -- The address of its page and metrics.
    address text,
    -- The sources that the process may run, and the sources whose journal is on its disk: DATABASE
    -- or DATABASE:SID.
    sources text[] not null default '{}',
    journals text[] not null default '{}',
    -- Sources that the process could not reach in its last attempt, which other replicas then try
    -- to run.
    out_of_reach text[] not null default '{}',
    max_sources integer,
    -- The fingerprint of the process's mapping: streamer.mapping tells whether this is the newest.
    mapping text,
    -- The process is about to end, and takes no sources.
    is_stopping boolean not null default false,
    -- The process increases this number every second. If the number stands still, another replica
    -- ends the process's sessions.
    beat bigint not null default 0,
    started_at timestamptz not null default now(),
    seen_at timestamptz not null default now()
);

-- The mappings that replicas have run, by fingerprint; the replicas run the newest revision. A
-- replica adds a revision when an operator has changed the mapping, or when no second replica runs.
create table streamer.mapping (
    revision bigint generated always as identity primary key,
    fingerprint text not null,
    since timestamptz not null default now()
);

-- Lag, rate and retained WAL of each source by the minute, for a day: at most 1,440 rows a source.
-- The process that runs the source writes the rows, and the pages of all processes read them. There
-- is no foreign key, because its check would lock the row of the source; rows are deleted after a
-- day.
create table streamer.minute (
    -- The beginning of the minute.
    at timestamptz not null,
    source_id bigint not null,
    lag_seconds real,
    changes_per_second real,
    retained_wal_bytes real,
    primary key (at, source_id)
);

-- The problems that the receiver of `notify` knows. A row goes once the receiver knows the end.
create table streamer.notification (
    kind text not null,
    -- The place of the problem: database, sid, table, sequence, or the target or mapping.
    subject jsonb not null,
    severity text not null,
    code text,
    since timestamptz not null,
    primary key (kind, subject)
);

create table streamer.relation (
    id bigint generated always as identity primary key,
    source_id bigint not null references streamer.source on delete cascade,
    source text not null,
    target text not null,
    -- The sid of the relation's rows in the target; null for rows without a sid.
    row_sid text,
    -- Whether only their keys distinguish the relation's rows from rows of other relations.
    disjoint boolean not null default false,
    type text not null check (type in ('clone', 'append', 'history')),
    state text not null default 'init'
        check (state in ('init', 'copying', 'catching_up', 'ready', 'paused', 'error')),
    -- The position of the copy's snapshot: the copied rows contain all earlier changes.
    snapshot_lsn pg_lsn,
    -- End of the last source transaction whose changes to this relation are in the target.
    end_lsn pg_lsn not null default '0/0',
    -- Increases whenever a copy begins again; rows of an older attempt no longer count.
    attempt integer not null default 0,
    rows_copied bigint not null default 0,
    bytes_copied bigint not null default 0,
    rows_total bigint,
    error text,
    error_code text,
    error_remedy jsonb,
    -- Whether streamer created the target table.
    target_created boolean not null default false,
    -- The fingerprint of the relation's membership in the publication. A session that drops and
    -- re-creates the membership changes the fingerprint.
    publication_membership text,
    -- The OID of the source's table at the guard's last check of the publication.
    source_oid int8,
    changed_at timestamptz not null default now(),
    -- Whether streamer has applied `initial: none`, which marks the table as in sync only once.
    declared boolean not null default false,
    -- Whether a copy writes directly to the target table, so that its rows of this source are
    -- incomplete.
    filling boolean not null default false,
    -- The `filter` and `set` of the rows in the target; null if the rule has neither. A new
    -- `filter` needs a new copy, a new `set` a backfill of columns.
    expressions text,
    -- The options of a resync, until its end.
    resync jsonb,
    -- Whether streamer wrote all rows of this source in the target, so that a copy may replace
    -- them.
    owns_rows boolean not null default false,
    -- Whether the table has ever been in sync, by a copy or by `initial: none`. `copy_where` limits
    -- only the copies before.
    was_in_sync boolean not null default false,
    -- The replicated partitions of a partitioned source table, by the source's OIDs; null until
    -- streamer has read them. The stream never contains the rows that a partition has at ATTACH.
    leaves int8[],
    -- The identity of old rows as published: 'full', 'key ...' or 'none'; null before the first time.
    identity text,
    -- Whether changes are permanently missing, so that an operator decides about the next copy.
    needs_resync boolean not null default false,
    -- For each of `leaves`, the transactions that attached the partition and the partitions above.
    -- The value changes when a session detaches and attaches the partition again.
    leaf_joins text[],
    -- The session or the work for which the table waits, with pid, role and query age of a lock's
    -- holder. This is not an error, because the table continues by itself.
    waiting_for text,
    -- `waiting_for` as data: {"text", "remedy", "is_turn"}; valid only if `waiting_for` is not
    -- null.
    wait jsonb,
    -- The source's columns with their numbers when the table was last in sync. A renamed column
    -- keeps its number; a column that was dropped and added again gets a new number.
    columns jsonb,
    -- The definition of the source's table as of the rows in the target; null until streamer has
    -- read the definition. The transaction that changes the target replaces the value.
    definition jsonb,
    -- The commit time, at the source, of the oldest change of the table that is not visible. Null
    -- while the table lags less than two seconds.
    lag_since timestamptz,
    -- All changes of the table up to this position are visible; stored while a client waits for the
    -- table.
    visible_lsn pg_lsn,
    -- The format in which the source sends values, and the reason; null before the first time.
    transport text check (transport in ('text', 'binary')),
    transport_reason text,
    -- The number of TRUNCATEs of the table that streamer has ignored (`skip_truncate`).
    truncates_skipped bigint not null default 0,
    -- The source transaction before which `max_deleted_rows` paused the table: {"xid", "lsn",
    -- "commit_time", "deleted_rows", "truncates"}. An operator's decision adds {"skips"}: whether
    -- streamer leaves the deletes out.
    mass_delete jsonb,
    -- Whether streamer left out deletes of such a transaction, so that the target may have rows
    -- that the source lacks, until the next copy.
    outlives boolean not null default false,
    -- Columns of the target whose values existing rows lack, until a copy has written the values.
    unfilled text[] not null default '{}',
    -- Whether existing rows need a copy that streamer began by itself, until a copy has succeeded.
    copy_is_due boolean not null default false,
    -- Labels of enums that the source has renamed: {OID of the type: {former label: label}}. Rows
    -- of earlier transactions may still have the former labels.
    former_labels jsonb not null default '{}',
    -- While a copy in chunks is in progress: {"columns", "types", "border", "definition", "count",
    -- "chunk_bytes", "size_bytes", "began_at", "attempt"}. The target has the rows up to the
    -- border.
    chunks jsonb,
    -- The storage of the source's table, or of each partition, when rows and stream agreed. The
    -- form is {OID: [OID of the TOAST table, file, digest of the columns' types]}; file 0: the rows
    -- no longer agree. Null until streamer has read the storage.
    storage jsonb,
    unique (source_id, source)
);
-- Before streamer writes to a table, it reads the peer sources of that table.
create index relation_target on streamer.relation (target, source_id);

-- If a source leaves whose copy created a table of several sources, the table stays marked as
-- created by streamer. Otherwise a source that joins would add no indexes and constraints.
create function streamer.pass_creation_on() returns trigger language plpgsql as $$
begin
    update streamer.relation set target_created = true
    where id = (select min(id) from streamer.relation where target = old.target);
    return null;
end $$;
create trigger pass_creation_on after delete on streamer.relation
    for each row when (old.target_created) execute function streamer.pass_creation_on();

-- Moves progress rows, as the last statement before the COMMIT of their changes. Fails unless each
-- row has the position that the process stored last, and the process holds the source's lock.
create function streamer.set_progress(
    ids int8[], old_lsns pg_lsn[], new_lsns pg_lsn[], source_ids int8[], tokens text[]
) returns void language plpgsql as $$
declare
    moved int8[];
begin
    with changed as (
        update streamer.relation r set end_lsn = p.new_lsn
        from unnest(ids, old_lsns, new_lsns) p (id, old_lsn, new_lsn),
             unnest(source_ids, tokens) c (source_id, token), streamer.source s
        where r.id = p.id and r.end_lsn = p.old_lsn
          and s.id = r.source_id and c.source_id = s.id and c.token = s.lock_token
        returning r.id
    )
    select array_agg(id) into moved from changed;
    if cardinality(moved) is distinct from cardinality(ids) then
        raise exception using errcode = 'STR01', message = 'stored progress was moved',
            detail = array_to_string(
                array(select i from unnest(ids) i where i <> all (coalesce(moved, '{}'))), ',');
    end if;
end
$$;

-- Fails unless a statement has touched the expected number of rows.
create function streamer.require_rows(touched int8, needed int8) returns void language plpgsql as $$
begin
    if touched <> needed then
        raise exception using errcode = 'STR04',
            message = pg_catalog.format('%s rows instead of %s', touched, needed);
    end if;
end
$$;

-- Fails if a target table differs from the planned table; otherwise returns false. The facts about
-- a column are the OID of the type, the type modifier and the OID of the collation.
create function streamer.require_facts(relation text, facts text, names text[], types text[])
returns boolean language plpgsql as $$
begin
    if exists (select from unnest(names, types) p (name, facts)
               where not exists (select from pg_catalog.pg_attribute a
                                  where a.attrelid = pg_catalog.to_regclass(relation)
                                    and a.attname = p.name
                                    and pg_catalog.concat_ws(' ', a.atttypid, a.atttypmod,
                                                             a.attcollation) = p.facts))
       or not exists (
           select from pg_catalog.pg_class c
           where c.oid = pg_catalog.to_regclass(relation) and facts = pg_catalog.concat_ws(' ',
               c.relpersistence,
               exists (select from pg_catalog.pg_trigger t
                        where t.tgrelid = c.oid and not t.tgisinternal
                          and t.tgenabled in ('A', 'R')),
               exists (select from pg_catalog.pg_rewrite r
                        where r.ev_class = c.oid and r.ev_enabled in ('A', 'R')),
               exists (select from pg_catalog.pg_constraint k
                        where k.confrelid = c.oid and k.contype = 'f'
                          and k.confdeltype in ('c', 'n', 'd')),
               array(select i.indexrelid from pg_catalog.pg_index i
                      where i.indrelid = c.oid and i.indisunique and i.indimmediate
                        and i.indisvalid and i.indpred is null and i.indexprs is null
                      order by 1)::text)) then
        raise exception using errcode = 'STR02',
            message = 'table ' || relation || ' was changed meanwhile';
    end if;
    return false;
end
$$;

-- A variant for the condition of a statement. The planner evaluates an immutable function, and
-- repeats this after each change of the table's definition. The inner function takes a new
-- snapshot, because the planner's snapshot may be older than the lock of the table.
create function streamer.fits_plan(relation text, facts text, names text[], types text[])
returns boolean immutable language plpgsql as $$
begin
    return streamer.require_facts(relation, facts, names, types);
end
$$;

-- Returns a name for each value of a type; values that are equal to the type have the same name.
-- The name is the hash of a value, or the text if the type has no hash. The name of a value that
-- the type refuses is null. Values are documents with a field v.
create function streamer.name_values(kind text, documents text[])
returns text[] language plpgsql as $$
declare
    query constant text :=
        'select pg_catalog.array_agg(%s order by d.n)'
        ' from pg_catalog.unnest($1) with ordinality d (document, n),'
        ' lateral pg_catalog.json_to_record(d.document::json) as r (v %s)';
    hashed constant text := pg_catalog.format(
        query, 'pg_catalog.hash_array_extended(array[r.v], 0)::text', kind);
    printed constant text := pg_catalog.format(query, '''='' || r.v::text', kind);
    names text[] := '{}';
    name text[];
    document text;
begin
    execute hashed into names using documents;
    return names;
exception when others then
    names := '{}';
    foreach document in array documents loop
        begin
            execute hashed into name using array[document];
        exception when others then
            begin
                execute printed into name using array[document];
            exception when others then
                name := array[null];
            end;
        end;
        names := names || name;
    end loop;
    return names;
end
$$;

-- Relations that are no longer mapped, with their last state, because streamer still owns their
-- rows in the target. A relation that returns continues in this state if streamer has acknowledged
-- no change since; otherwise streamer copies the table.
create table streamer.former_relation (
    source_id bigint not null references streamer.source on delete cascade,
    source text not null,
    acknowledged_lsn pg_lsn not null,
    relation jsonb not null,
    primary key (source_id, source)
);

-- A row for each part of a copy. A task locks the row, copies, and marks the row in a single
-- transaction. So a part is copied once, even if the task runs twice.
create table streamer.sync_partition (
    relation_id bigint not null references streamer.relation on delete cascade,
    part integer not null,
    attempt integer not null,
    description text not null,
    rows_copied bigint,
    bytes_copied bigint,
    started_at timestamptz,
    finished_at timestamptz,
    error text,
    -- The kind of an error that ends the copy of the table: 'changed' or 'refused'.
    failure text,
    -- The constraint or unique index of the target that refuses a row of the part.
    failed_constraint text,
    -- The size of the part in the source's table.
    size_bytes bigint not null default 0,
    primary key (relation_id, part)
);

-- A comparison that has not ended. On request, the next comparison of the same tables continues it.
create table streamer.comparison (
    id bigint generated always as identity primary key,
    -- Digest of the compared tables: definitions, files, numbers of copies, options.
    fingerprint text not null unique,
    began_at timestamptz not null default now(),
    -- The position of each source at the beginning, by the id of the source.
    lsns jsonb not null
);

-- The ranges of a comparison. A range with numbers of rows was found equal.
create table streamer.compared_range (
    comparison_id bigint not null references streamer.comparison on delete cascade,
    relation_id bigint not null references streamer.relation on delete cascade,
    number integer not null,
    -- Bounds of the key, as text; null for no bound.
    lower text[],
    upper text[],
    source_rows bigint,
    target_rows bigint,
    primary key (comparison_id, relation_id, number)
);

-- The last comparison of all rows of a relation, by a command or by the running process.
create table streamer.verification (
    relation_id bigint primary key references streamer.relation on delete cascade,
    ended_at timestamptz not null,
    -- The beginning of the last comparison that found the relation equal, and the position of the
    -- source then.
    verified_at timestamptz,
    lsn pg_lsn,
    -- Rows that differ: missing, extra or with different values.
    differing_rows bigint not null,
    -- Rows that differed in every reading, but may not be wrong.
    undecided_rows bigint not null,
    -- The reason why the relation could not be compared.
    error text
);

-- Indexes that streamer dropped for a copy. The transaction of the DROP writes these rows.
create table streamer.deferred_index (
    id bigint generated always as identity primary key,
    target text not null,
    definition text not null
);

-- Definitions of target tables beside columns: indexes, constraints, defaults and comments of the
-- source's tables, as `create` asks for. A copy of the table replaces these rows.
create table streamer.definition (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    kind text not null,
    name text not null,
    -- unwanted: the source has dropped the object, but a session of streamer may have created it
    -- meanwhile.
    state text not null check (state in ('pending', 'made', 'failed', 'unmade', 'unwanted')),
    -- As unwanted, but the source has since created a new object of that name. After the drop of
    -- the old object, this row is pending.
    made_again boolean not null default false,
    -- The index that the first of the statements in `online` builds concurrently.
    index_name text,
    -- Arrays of statements: for a table that only a single session uses, and for a table in use.
    statements json not null,
    online json not null,
    sql text not null,
    -- The reason why the target lacks the definition.
    reason text,
    attempts integer not null default 0,
    -- The target table that a foreign key refers to.
    referenced text,
    unique (relation_id, kind, name)
);

-- Requests of operators, which a running process fulfils at once, and a stopped process at its next
-- start.
create table streamer.request (
    id bigint generated always as identity primary key,
    -- Null for an act that concerns no table, and once the table is no longer mapped.
    relation_id bigint references streamer.relation on delete set null,
    -- The source that a request concerns as a whole; null for the rest.
    source_id bigint references streamer.source on delete set null,
    action text not null,
    options jsonb not null default '{}',
    -- running: an act of a command that does the work, such as a purge or a script.
    state text not null default 'queued'
        check (state in ('queued', 'taken', 'running', 'done', 'failed')),
    -- The reason why the request failed.
    error text,
    error_code text,
    error_remedy jsonb,
    -- The user of the page, the API or the command line. Null: streamer.
    actor text,
    -- The names of source and table, which stay after both are removed.
    label text,
    requested_at timestamptz not null default pg_catalog.clock_timestamp(),
    taken_at timestamptz,
    ended_at timestamptz,
    check (state not in ('queued', 'taken') or action in (
        'resync', 'pause', 'resume', 'quarantine_retry', 'quarantine_drop', 'ddl_apply', 'ddl_skip',
        'restart'))
);
create index request_relation on streamer.request (relation_id);
create index request_source on streamer.request (source_id) where source_id is not null;
create index request_open on streamer.request (id) where state in ('queued', 'taken');
-- Every request uses this index to delete rows that are too old.
create index request_requested_at on streamer.request (requested_at);

-- Sequences of the target that follow sequences of a source, with the last value of each that
-- streamer has read; null before the first use.
create table streamer.sequence (
    source_id bigint not null references streamer.source on delete cascade,
    source text not null,
    target text not null,
    source_value bigint,
    target_value bigint,
    -- The reason why the target's sequence cannot follow.
    error text,
    error_remedy jsonb,
    primary key (source_id, source)
);

-- Scripts of `streamer execute`, with a row for each script and source. The row, with the number of
-- the transaction, exists before the source commits the transaction that carries the script.
create table streamer.script (
    source_id bigint not null references streamer.source on delete cascade,
    id text not null,
    script text not null,
    -- The text that the target runs instead of the script, if an operator has edited the script.
    replacement text,
    side text not null check (side in ('source', 'target', 'both')),
    state text not null default 'waiting'
        check (state in ('waiting', 'error', 'missed', 'done', 'skipped')),
    -- The transaction's number at the source, in 64 bits.
    source_xid bigint,
    -- The server and the timeline of that number; null if the role may not read them.
    system_identifier text,
    timeline int,
    -- The position at which that transaction commits in the stream, once the target has run the
    -- script.
    lsn pg_lsn,
    -- The reason why the target refuses the script.
    error text,
    requested_at timestamptz not null default pg_catalog.clock_timestamp(),
    finished_at timestamptz,
    primary key (source_id, id)
);

-- The cut-over of a source: the last step that began, and the facts to undo the step.
create table streamer.cutover (
    source_id bigint primary key references streamer.source on delete cascade,
    step text not null,
    details jsonb not null,
    -- The end of the source's WAL after the last write.
    marker_lsn pg_lsn,
    began_at timestamptz not null default pg_catalog.clock_timestamp(),
    -- The time since which applications may write to the target, so that there is no way back.
    finished_at timestamptz
);

-- Changes that wait in the memory or the spool of the process, which reports them every few seconds.
create table streamer.held (
    relation_id bigint primary key references streamer.relation on delete cascade,
    changes bigint not null,
    bytes bigint not null,
    -- The source must retain the WAL from this position on for these changes.
    behind_lsn pg_lsn
);

-- Changes that the target refused, and later changes of the same rows, in the order of the source.
-- Values are text under the source's names, so that a retry works under a later definition of the
-- target. A value that the source did not send (unchanged TOAST) is absent.
create table streamer.quarantine (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    operation text not null check (operation in ('insert', 'update', 'delete')),
    -- The identity of the row after the change; null if the row has none.
    key json,
    old json,
    new json,
    -- The definition of the source's table at the time of the change.
    definition json not null,
    -- The source transaction: position and time of its commit, and its xid.
    lsn pg_lsn not null,
    commit_time timestamptz not null,
    xid bigint not null,
    error text not null,
    -- SQLSTATE; null if the change only follows an earlier change of the row.
    code text,
    quarantined_at timestamptz not null default now(),
    retried_at timestamptz,
    -- In a history table, the time at which a TRUNCATE, or the removal of a partition, ended the
    -- versions that this change writes.
    ended_at timestamptz
);
create index quarantine_relation on streamer.quarantine (relation_id, id);

-- Changes whose row the target lacked or already had. The transaction that applies or quarantines
-- the change adds the conflict. If the table stops, the transaction that stores the table's state
-- adds it.
create table streamer.conflict (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    -- PostgreSQL's name of the conflict, such as insert_exists, update_missing or delete_missing.
    kind text not null,
    -- The resolution: the missing row was inserted, its delete was ignored, or the change is not
    -- applied.
    resolution text not null
        check (resolution in ('inserted', 'ignored', 'quarantined', 'stopped')),
    operation text not null check (operation in ('insert', 'update', 'delete')),
    -- The identity of the row, by the source's names of the columns; null if the row has none.
    key json,
    -- The source transaction: position and time of its commit, and its xid.
    lsn pg_lsn not null,
    commit_time timestamptz not null,
    xid bigint not null,
    -- The target's row that has the key: xmin, and the time of the commit if the target has
    -- track_commit_timestamp. Null if there is none.
    existing json,
    noted_at timestamptz not null default pg_catalog.clock_timestamp()
);
create index conflict_relation on streamer.conflict (relation_id, id);
-- A stopped table meets the same conflict at every retry.
create unique index conflict_stopped on streamer.conflict (relation_id, lsn, kind)
    where resolution = 'stopped';

-- Commands that changed the definition of a source's table, with the effect in the target.
create table streamer.ddl (
    id bigint generated always as identity primary key,
    relation_id bigint not null references streamer.relation on delete cascade,
    -- The position of the commit record of the source's transaction, and the number of the command
    -- among the transaction's commands for the table.
    lsn pg_lsn not null,
    number integer not null,
    -- The statement at the source, the changes as text, and the statements at the target.
    query text not null,
    changes text[] not null,
    statements text[] not null,
    -- The reason why the command waits, or why columns of existing rows need a backfill.
    reason text,
    -- `apply` and `skip` are decisions of an operator that the process has not carried out yet.
    -- `made`: the table has not reached the command yet, or has not retried it.
    state text not null check (state in ('waiting', 'made', 'apply', 'skip', 'applied', 'skipped')),
    -- Whether a peer source has made the command for this source, too.
    is_made boolean not null default false,
    -- The statements that an operator chose instead of `statements`.
    edited text[],
    changed_at timestamptz not null default now(),
    unique (relation_id, lsn, number)
);

-- Target tables with rows of a removed source, and the progress of the purge. The transaction that
-- removes the source adds the rows; `streamer tenants purge` updates them.
create table streamer.purge (
    database text not null,
    -- Empty for a source without sid: a purge cannot find its rows, but streamer records that they
    -- remain.
    sid text not null,
    target text not null,
    rows_deleted bigint not null default 0,
    -- No block of the table before this block has rows of the source. The transaction that deletes
    -- rows moves the block. Null before the purge begins.
    next_block bigint,
    blocks bigint,
    began_at timestamptz,
    finished_at timestamptz,
    -- The columns that the source has ever filled, by the source's names.
    columns text[] not null default '{}',
    primary key (database, sid, target)
);

-- The id by which this installation recognizes its slots and publications.
create table streamer.installation (id text primary key);
insert into streamer.installation
select md5(concat(random(), clock_timestamp(), current_database(), pg_backend_pid()));
