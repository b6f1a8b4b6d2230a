-- The first contents of each of the two sources.
create table customers (
    id bigint generated always as identity primary key,
    name text not null,
    city text not null,
    changed_at timestamptz not null default now()
);
create table orders (
    id bigint generated always as identity primary key,
    customer_id bigint not null references customers,
    total numeric(10, 2) not null,
    state text not null default 'open'
);
insert into customers (name, city)
select 'Customer ' || n, (array['Lyon', 'Porto', 'Graz', 'Turku'])[1 + n % 4]
from generate_series(1, 50000) n;
insert into orders (customer_id, total)
select 1 + n % 50000, round((random() * 500)::numeric, 2) from generate_series(1, 200000) n;
analyze;
