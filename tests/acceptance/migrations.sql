-- Fifty steps of a web application's schema, as Django and Rails write them.
--
-- A step begins with `--- name`. It runs in one transaction; `[alone]`: each statement in its own.
-- `[stops table kind]`: the change that may lose values, for which the table can stop.

--- AddField: a column that may be null
alter table users add column nickname varchar(30);

--- AddField: NOT NULL with a default that Django drops
alter table users add column is_active boolean default true not null;
alter table users alter column is_active drop default;
alter table users alter column is_active set default false;

--- add_index algorithm: :concurrently [alone]
create index concurrently index_users_on_nickname on users (nickname);

--- change_column_default, before the backfill
alter table users alter column nickname set default 'anon';

--- RunPython: a backfill in batches [alone]
update users set nickname = left(split_part(email, '@', 1), 30) where nickname is null and id % 2 = 0;
update users set nickname = left(split_part(email, '@', 1), 30) where nickname is null;

--- add_check_constraint validate: false
alter table users add constraint users_nickname_null check (nickname is not null) not valid;

--- validate_check_constraint, change_column_null, remove_check_constraint
alter table users validate constraint users_nickname_null;
alter table users alter column nickname set not null;
alter table users drop constraint users_nickname_null;

--- RenameField
alter table posts rename column body to content;

--- AlterField: a longer varchar
alter table posts alter column title type varchar(200);

--- AlterField: integer to bigint
alter table posts alter column views type bigint;

--- AlterField: text to integer [stops posts change_type]
alter table posts alter column rating type integer using rating::integer;

--- create_enum, add_column
create type post_status as enum ('draft', 'published');
alter table posts add column status post_status not null default 'draft';
update posts set status = 'published' where id % 2 = 0;

--- add_enum_value [alone]
alter type post_status add value 'archived' before 'published';

--- RunPython: rows get the new value
update posts set status = 'archived' where id % 3 = 0;

--- rename_enum_value
update posts set status = 'published' where id % 5 = 0;
alter type post_status rename value 'published' to 'live';
insert into posts (title, content, status) values ('renamed', 'x', 'live');

--- RemoveField [stops posts drop_column]
alter table posts drop column legacy;

--- add_reference validate: false
alter table comments add column author_id integer;
alter table comments add constraint comments_author_fk foreign key (author_id)
    references users (id) not valid;

--- RunPython: references, with a savepoint that is undone
update comments set author_id = 1;
savepoint batch;
update comments set author_id = 2;
alter table comments add column mistake integer;
rollback to savepoint batch;
update comments set author_id = 1 + id % 3;

--- validate_foreign_key
alter table comments validate constraint comments_author_fk;

--- add_index: a foreign key [alone]
create index concurrently index_comments_on_author_id on comments (author_id);

--- add_index unique [alone]
create unique index concurrently index_tags_on_post_and_name on tags (post_id, name);

--- add_unique_constraint using_index
alter table tags add constraint tags_post_name_uniq unique using index index_tags_on_post_and_name;

--- RenameIndex
alter index index_users_on_nickname rename to users_nickname_idx;

--- AddConstraint: a check
alter table orders add constraint orders_total_check check (total >= 0);

--- AddConstraint: a new check under the same name
alter table orders drop constraint orders_total_check,
    add constraint orders_total_check check (total >= 0 and total < 1000000);

--- AlterField: a default that is computed
alter table orders alter column created_at set default now();

--- AddField: a volatile default
alter table orders add column token uuid default gen_random_uuid();

--- AddField: jsonb, AddIndex: gin
alter table posts add column meta jsonb not null default '{}';
create index posts_meta_gin on posts using gin (meta);

--- add_index where:
create index index_orders_open on orders (created_at desc) where closed_at is null;

--- AddIndex: an expression
create index users_email_lower on users (lower(email));

--- AlterUniqueTogether: by the expression, in place of the index
create unique index users_email_key on users (lower(email), id);
drop index users_email_lower;

--- remove_index algorithm: :concurrently [alone]
drop index concurrently users_nickname_idx;

--- GeneratedField
alter table orders add column gross numeric generated always as (total * 1.25) stored;

--- change_table bulk: several ALTERs, rows between them
alter table users add column first_name text, add column last_name text not null default '';
update users set first_name = nickname where id % 2 = 0;
alter table users rename column last_name to family_name;
insert into users (email, family_name) values ('bulk@example.org', 'Bulk');
alter table users alter column first_name set default 'x', drop constraint if exists nothing;
update users set family_name = first_name where first_name is not null;

--- atomic: an inner block fails and is undone
savepoint inner_block;
alter table posts add column half integer default 1;
create index posts_half on posts (half);
update posts set half = id;
rollback to savepoint inner_block;
alter table posts add column whole integer default 2;

--- a migration that fails [rolls back]
alter table orders add column never integer default 9;
alter type post_status rename value 'draft' to 'sketch';
create index orders_never on orders (never);

--- the same migration, corrected
alter table orders add column at_last integer default 9;
create index orders_at_last on orders (at_last);

--- a large transaction, which the source streams
insert into events (payload) select repeat('p', 200) from generate_series(1, 400);
alter table events add column kind text default 'old';
update events set kind = 'new' where id % 2 = 0;
savepoint large;
alter table events add column lost integer default 4;
insert into events (payload, lost) select repeat('q', 200), g from generate_series(1, 300) g;
rollback to savepoint large;
alter table events rename column payload to body;
insert into events (body, kind) select repeat('r', 200), 'last' from generate_series(1, 300);

--- create_domain, add_column
create domain email as text constraint email_at check (value like '%@%');
alter table users add column contact email default 'none@example.org';

--- change_domain
alter domain email drop constraint email_at;
alter domain email add constraint email_length check (length(value) < 300);

--- create_type: composite, in a column
create type address as (street text, city text);
alter table orders add column ship_to address;
update orders set ship_to = row('Main', 'Aachen') where id % 2 = 0;

--- add_attribute, rename_attribute
alter type address add attribute zip text;
alter type address rename attribute street to line;
update orders set ship_to = row('Side', 'Bonn', '53111') where id % 3 = 0;

--- drop_attribute [stops orders drop_attribute]
alter type address drop attribute city;

--- RenameConstraint
alter table comments rename constraint comments_author_fk to comments_author_id_fkey;

--- integer key to bigint without a rewrite: the new column
alter table comments add column post_big bigint;
update comments set post_big = post_id;

--- integer key to bigint: the old column goes [stops comments drop_column]
alter table comments drop column post_id;
alter table comments rename column post_big to post_id;

--- ExclusionConstraint
alter table orders add column during tsrange;
alter table orders add constraint orders_apart exclude using gist (during with &&);

--- AddConstraint: deferrable
alter table tags add column position integer;
update tags set position = id;
alter table tags add constraint tags_position_key unique (post_id, position)
    deferrable initially deferred;

--- AlterField: null=True
alter table users alter column is_active drop not null;

--- AlterField: on_delete, by the constraint anew
alter table comments drop constraint comments_author_id_fkey,
    add constraint comments_author_id_fkey foreign key (author_id) references users (id)
        on delete cascade;

--- rename_enum, array_column
alter type post_status rename to status_of_post;
alter table posts add column history status_of_post[] not null default '{}';
create index posts_history on posts using gin (history);

--- several tables in one migration
alter table users add column posts_count integer not null default 0;
alter table posts add column comments_count integer not null default 0;
update users set posts_count = 1 where id % 2 = 0;
update posts set comments_count = 1 where id % 2 = 0;
alter table tags rename column name to label;
insert into tags (post_id, label, position) values (1, 'several', 9000);

--- enum, first way: by text, and the type anew [stops tickets change_type]
alter table tickets alter column state drop default;
alter table tickets alter column state type text using state::text;
drop type ticket_state;
create type ticket_state as enum ('new', 'open', 'closed');
update tickets set state = 'new' where state = 'begun';
alter table tickets alter column state type ticket_state using state::ticket_state;
alter table tickets alter column state set default 'new';

--- RunPython: rows get the new labels
update tickets set state = 'new' where id % 3 = 0;
insert into tickets (title) values ('with the new default');

--- enum, second way: a new type that takes the name [stops tickets change_type]
create type ticket_state_new as enum ('new', 'open', 'closed', 'void');
alter table tickets alter column state drop default;
alter table tickets alter column state type ticket_state_new using state::text::ticket_state_new;
alter table tickets alter column state set default 'open';
drop type ticket_state;
alter type ticket_state_new rename to ticket_state;
update tickets set state = 'void' where id % 4 = 0;

--- enum, third way: the old type steps aside [stops tickets change_type]
alter type ticket_state rename to ticket_state_old;
create type ticket_state as enum ('open', 'closed', 'gone');
update tickets set state = 'closed' where state in ('new', 'void');
alter table tickets alter column state drop default;
alter table tickets alter column state type ticket_state
    using (case state::text when 'closed' then 'gone' else state::text end)::ticket_state;
alter table tickets alter column state set default 'open';
drop type ticket_state_old;

--- RunPython: rows after the third way
update tickets set state = 'closed' where id % 5 = 0;
insert into tickets (title, state) values ('third', 'gone');

--- AlterField: text to enum [stops tickets change_type]
create type ticket_kind as enum ('bug', 'wish');
alter table tickets alter column kind drop default;
alter table tickets alter column kind type ticket_kind using kind::ticket_kind;

--- change_column using an expression, not null in the same command [stops tickets change_type]
alter table tickets alter column notes type jsonb using jsonb_build_object('text', coalesce(notes, '')),
    alter column notes set not null;

--- RemoveField, AddField: a column comes again under its name [stops tickets drop_column]
alter table tickets drop column rank;
alter table tickets add column rank integer not null default 7;
update tickets set rank = id where id % 2 = 0;

--- two columns exchange their names
alter table tickets rename column opened to swapping;
alter table tickets rename column due to opened;
alter table tickets rename column swapping to due;
update tickets set due = due + 1 where id % 3 = 1;

--- change_column: a new collation
alter table tickets alter column title type text collate "C";

--- AlterField: a primary key of a different column [alone]
alter table ledgers drop constraint ledgers_pkey;
alter table ledgers add primary key (uid);

--- RunPython: rows by the new key
update ledgers set amount = amount + 1 where id % 2 = 0;
delete from ledgers where id % 7 = 3;

--- AutoField to BigAutoField [alone]
alter table accounts alter column id type bigint;
create sequence accounts_id_big as bigint;
select setval('accounts_id_big', (select max(id) + 1000 from accounts));
alter table accounts alter column id set default nextval('accounts_id_big');
alter sequence accounts_id_big owned by accounts.id;
drop sequence accounts_id_seq;
alter sequence accounts_id_big rename to accounts_id_seq;

--- integer key to bigint online: column, trigger, index [alone]
alter table payments add column new_id bigint not null default 0;
create function payments_new_id() returns trigger language plpgsql as 'begin new.new_id := new.id; return new; end';
create trigger payments_new_id before insert or update on payments for each row execute function payments_new_id();
update payments set new_id = id where id % 2 = 0 and new_id = 0;
update payments set new_id = id where new_id = 0;
create unique index concurrently payments_new_id_key on payments (new_id);

--- integer key to bigint online: the keys exchange [stops payments drop_column]
lock table payments in access exclusive mode;
alter table payments drop constraint payments_pkey;
alter table payments rename column id to old_id;
alter table payments rename column new_id to id;
alter sequence payments_id_seq as bigint;
alter sequence payments_id_seq owned by payments.id;
alter table payments alter column id set default nextval('payments_id_seq');
alter table payments alter column old_id drop default;
alter table payments add constraint payments_pkey primary key using index payments_new_id_key;
drop trigger payments_new_id on payments;
drop function payments_new_id();
alter table payments drop column old_id;

--- RunPython: rows by the big key
insert into payments (amount) values (3000000000), (17);
update payments set amount = amount + 1 where id % 2 = 0;

--- split a table: columns move to another [stops accounts drop_column]
create table shop_profiles (
    account_id bigint primary key references accounts (id), city text, zip varchar(10)
);
insert into shop_profiles select id, city, zip from accounts;
alter table accounts drop column city, drop column zip;

--- swap a table by its name [resync sessions]
create table sessions_new (id integer primary key, token text not null, seen timestamptz default now());
insert into sessions_new (id, token) select id, token || '!' from sessions;
alter table sessions rename to sessions_old;
alter table sessions_new rename to sessions;
drop table sessions_old;
alter index sessions_new_pkey rename to sessions_pkey;

--- RunPython: rows of the swapped table
insert into sessions values (1001, 'after');
update sessions set token = token || '?' where id % 2 = 0;

--- create a partition, with rows
create table readings_2025 partition of readings for values from ('2025-01-01') to ('2026-01-01');
insert into readings (at, value) select date '2025-01-01' + g, g from generate_series(1, 50) g;

--- attach a partition with rows
create table readings_2026 (like readings including all);
insert into readings_2026 (at, value) select date '2026-01-01' + g, -g from generate_series(1, 50) g;
alter table readings_2026 add constraint readings_2026_at check (at >= '2026-01-01' and at < '2027-01-01');
alter table readings attach partition readings_2026
    for values from ('2026-01-01') to ('2027-01-01');
alter table readings_2026 drop constraint readings_2026_at;
update readings set value = value + 1 where at >= '2026-06-01';

--- a column, an index and a check of a partitioned table
alter table readings add column unit text not null default 'mm';
create index readings_value on readings (value);
alter table readings add constraint readings_unit check (unit <> '');
update readings set unit = 'cm' where id % 3 = 0;

--- detach and drop a partition [stops readings detach_partition]
alter table readings detach partition readings_2024;
drop table readings_2024;

--- rows of a partition move to another
update readings set at = at + 365 where at between '2025-01-01' and '2025-12-31' and id % 4 = 0;

--- create_table: it joins by its pattern
create table shop_invoices (
    id serial primary key, order_id integer references orders (id), total numeric not null
);
insert into shop_invoices (order_id, total) select min(id), 5 from orders;

--- RunPython: rows of the new table
insert into shop_invoices (order_id, total) select id, total from orders where id <= 5;
alter table shop_invoices add column paid boolean not null default false;

--- rename_table
alter table shop_invoices rename to shop_bills;
insert into shop_bills (total, paid) values (7, true);

--- add_index of the renamed table
create index index_shop_bills_on_order_id on shop_bills (order_id) where not paid;

--- drop_table
drop table if exists shop_nothing;
create table shop_gone (id integer primary key);
drop table shop_gone;
