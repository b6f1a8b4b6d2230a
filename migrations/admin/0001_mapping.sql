-- The mapping that operators edit while streamer runs. These tables hold the draft; streamer runs the
-- newest revision.

create table database (
    id integer primary key autoincrement,
    name text not null unique check (name <> ''),
    -- The remaining settings of a group of databases, as in the YAML. An absent setting has its
    -- default.
    settings text not null default '{}' check (json_type(settings) = 'object')
);

create table url (
    id integer primary key autoincrement,
    database_id integer not null references database on delete cascade,
    sid text check (sid <> ''),
    -- The url with *** instead of passwords.
    url text not null,
    -- The complete url, encrypted; null if the url has no password, or only references to
    -- variables.
    secret text,
    settings text not null default '{}' check (json_type(settings) = 'object')
);
create unique index url_key on url (database_id, coalesce(sid, ''));

create table "table" (
    id integer primary key autoincrement,
    database_id integer not null references database on delete cascade,
    -- The schema and the name as in the YAML; a part may be a pattern.
    namespace text not null,
    name text not null,
    settings text not null default '{}' check (json_type(settings) = 'object'),
    unique (database_id, namespace, name)
);

-- Settings of the mapping as a whole, by name.
create table setting (
    name text primary key,
    value text not null check (json_valid(value))
);

-- The applied drafts: the rows of the tables above, passwords encrypted.
create table revision (
    number integer primary key autoincrement,
    applied_at text not null,
    actor text not null,
    content text not null check (json_valid(content))
);

create table audit (
    id integer primary key autoincrement,
    at text not null,
    actor text not null,
    action text not null,
    object text not null,
    object_id integer,
    label text not null,
    -- The object before and after the change, without passwords; null if there was or is no object.
    before text,
    after text
);
-- Every change uses this index to delete audit rows that are too old.
create index audit_at on audit (at);

-- Users that an operator added, in addition to the users of the configuration file.
create table user (
    name text primary key check (name <> ''),
    role text not null check (role in ('viewer', 'admin')),
    -- argon2; never shown and never exported.
    password_hash text not null,
    created_at text not null
);
