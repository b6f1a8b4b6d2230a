-- Users that an operator added beside those of the configuration file.
create table user (
    name text primary key check (name <> ''),
    role text not null check (role in ('viewer', 'admin')),
    -- argon2; never shown and never exported.
    password_hash text not null,
    created_at text not null
);
