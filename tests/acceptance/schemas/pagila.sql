-- The structure of Pagila, the sample database of a shop for films, written anew.

create domain year as integer constraint year_check check (value >= 1901 and value <= 2155);
create type mpaa_rating as enum ('G', 'PG', 'PG-13', 'R', 'NC-17');
create function last_updated() returns trigger language plpgsql as $$
begin
    new.last_update = current_timestamp;
    return new;
end $$;
create function _group_concat(text, text) returns text language sql immutable as $$
    select case when $2 is null then $1 when $1 is null then $2 else $1 || ', ' || $2 end
$$;
create aggregate group_concat(text) (sfunc = _group_concat, stype = text);

create sequence actor_actor_id_seq;
create sequence customer_customer_id_seq start with 100 increment by 1 no minvalue no maxvalue cache 1;
create sequence payment_payment_id_seq;

create table actor (
    actor_id integer default nextval('actor_actor_id_seq'::regclass) primary key,
    first_name text not null,
    last_name text not null,
    last_update timestamp with time zone default now() not null
);
create table category (
    category_id serial primary key,
    name text not null,
    last_update timestamp with time zone default now() not null
);
create table language (
    language_id serial primary key,
    name character(20) not null,
    last_update timestamp with time zone default now() not null
);
create table film (
    film_id serial primary key,
    title text not null,
    description text,
    release_year year,
    language_id integer not null,
    original_language_id integer,
    rental_duration smallint default 3 not null,
    rental_rate numeric(4,2) default 4.99 not null,
    length smallint,
    replacement_cost numeric(5,2) default 19.99 not null,
    rating mpaa_rating default 'G'::mpaa_rating,
    last_update timestamp with time zone default now() not null,
    special_features text[],
    fulltext tsvector not null
);
create table film_actor (
    actor_id integer not null,
    film_id integer not null,
    last_update timestamp with time zone default now() not null,
    primary key (actor_id, film_id)
);
create table film_category (
    film_id integer not null,
    category_id integer not null,
    last_update timestamp with time zone default now() not null,
    primary key (film_id, category_id)
);
create table country (
    country_id serial primary key,
    country text not null,
    last_update timestamp with time zone default now() not null
);
create table city (
    city_id serial primary key,
    city text not null,
    country_id integer not null references country on update cascade on delete restrict,
    last_update timestamp with time zone default now() not null
);
create table address (
    address_id serial primary key,
    address text not null,
    address2 text,
    district text not null,
    city_id integer not null references city on update cascade on delete restrict,
    postal_code text,
    phone text not null,
    last_update timestamp with time zone default now() not null
);
create table store (
    store_id serial primary key,
    manager_staff_id integer not null,
    address_id integer not null references address on update cascade on delete restrict,
    last_update timestamp with time zone default now() not null
);
create table staff (
    staff_id serial primary key,
    first_name text not null,
    last_name text not null,
    address_id integer not null references address on update cascade on delete restrict,
    email text,
    store_id integer not null references store,
    active boolean default true not null,
    username text not null,
    password text,
    last_update timestamp with time zone default now() not null,
    picture bytea
);
create table customer (
    customer_id integer default nextval('customer_customer_id_seq'::regclass) primary key,
    store_id integer not null references store on update cascade on delete restrict,
    first_name text not null,
    last_name text not null,
    email text,
    address_id integer not null references address on update cascade on delete restrict,
    activebool boolean default true not null,
    create_date date default ('now'::text)::date not null,
    last_update timestamp with time zone default now(),
    active integer
);
create table inventory (
    inventory_id serial primary key,
    film_id integer not null references film on update cascade on delete restrict,
    store_id integer not null references store on update cascade on delete restrict,
    last_update timestamp with time zone default now() not null
);
create table rental (
    rental_id serial primary key,
    rental_period tsrange not null,
    inventory_id integer not null references inventory on update cascade on delete restrict,
    customer_id integer not null references customer on update cascade on delete restrict,
    staff_id integer not null references staff on update cascade on delete restrict,
    last_update timestamp with time zone default now() not null
);
create table payment (
    payment_id integer default nextval('payment_payment_id_seq'::regclass) not null,
    customer_id integer not null,
    staff_id integer not null,
    rental_id integer not null,
    amount numeric(5,2) not null,
    payment_date timestamp with time zone not null,
    primary key (payment_date, payment_id)
) partition by range (payment_date);
create table payment_p2022_01 partition of payment
    for values from ('2022-01-01 00:00:00+00') to ('2022-02-01 00:00:00+00');
create table payment_p2022_02 partition of payment
    for values from ('2022-02-01 00:00:00+00') to ('2022-03-01 00:00:00+00');
create table payment_rest partition of payment default;
create index idx_fk_payment_p2022_01_customer_id on payment_p2022_01 (customer_id);

alter table film add constraint film_language_id_fkey foreign key (language_id)
    references language on update cascade on delete restrict;
alter table film add constraint film_original_language_id_fkey foreign key (original_language_id)
    references language on update cascade on delete restrict;
alter table film_actor add constraint film_actor_actor_id_fkey foreign key (actor_id)
    references actor on update cascade on delete restrict;
alter table film_actor add constraint film_actor_film_id_fkey foreign key (film_id)
    references film on update cascade on delete restrict;
alter table film_category add constraint film_category_film_id_fkey foreign key (film_id)
    references film on update cascade on delete restrict;
alter table film_category add constraint film_category_category_id_fkey foreign key (category_id)
    references category on update cascade on delete restrict;
alter table store add constraint store_manager_staff_id_fkey foreign key (manager_staff_id)
    references staff on update cascade on delete restrict deferrable initially deferred;
alter table payment add constraint payment_customer_id_fkey foreign key (customer_id)
    references customer;

create index film_fulltext_idx on film using gist (fulltext);
create index idx_actor_last_name on actor (last_name);
create index idx_title on film (title);
create index idx_fk_store_id on customer (store_id);
create unique index idx_unq_manager_staff_id on store (manager_staff_id);
create unique index idx_unq_rental on rental (rental_period, inventory_id, customer_id);
create index idx_store_id_film_id on inventory (store_id, film_id);
create index idx_payment_rental on payment (rental_id);
alter table rental add constraint rental_apart
    exclude using gist (rental_period with &&) where (inventory_id = 1);

create view actor_info as
    select a.actor_id, a.last_name, group_concat(f.title) as films
      from actor a left join film_actor fa using (actor_id) left join film f using (film_id)
     group by a.actor_id, a.last_name;
create materialized view rental_by_category as
    select c.name, sum(p.amount) as total
      from payment p join rental using (rental_id) join inventory using (inventory_id)
      join film_category using (film_id) join category c using (category_id) group by c.name
  with no data;
create trigger film_fulltext_trigger before insert or update on film for each row
    execute function tsvector_update_trigger('fulltext', 'pg_catalog.english', 'title', 'description');
create trigger last_updated before update on film for each row execute function last_updated();
create trigger last_updated before update on customer for each row execute function last_updated();
comment on table film is 'What the shop lends';
comment on column film.fulltext is 'by a trigger';

-- rows
insert into actor (first_name, last_name) select 'F' || g, 'L' || g from generate_series(1, 20) g;
insert into category (name) values ('Action'), ('Drama');
insert into language (name) values ('English'), ('Deutsch');
insert into film (title, description, release_year, language_id, rating, special_features)
    select 'Film ' || g, 'about ' || g, 1990 + g, 1 + g % 2, (enum_range(null::mpaa_rating))[1 + g % 5],
           array['Trailers', 'Deleted Scenes'] from generate_series(1, 20) g;
insert into film_actor (actor_id, film_id) select g, g from generate_series(1, 20) g;
insert into film_category (film_id, category_id) select g, 1 + g % 2 from generate_series(1, 20) g;
insert into country (country) values ('Deutschland');
insert into city (city, country_id) values ('Aachen', 1);
insert into address (address, district, city_id, phone) values ('Markt 1', 'NRW', 1, '0241');
insert into store (manager_staff_id, address_id) values (1, 1);
insert into staff (first_name, last_name, address_id, store_id, username, picture)
    values ('M', 'S', 1, 1, 'ms', '\x8950');
insert into customer (store_id, first_name, last_name, address_id)
    select 1, 'C' || g, 'D' || g, 1 from generate_series(1, 10) g;
insert into inventory (film_id, store_id) select g, 1 from generate_series(1, 20) g;
insert into rental (rental_period, inventory_id, customer_id, staff_id)
    select tsrange('2022-01-01'::timestamp + g * interval '1 day', '2022-01-01'::timestamp + (g + 1) * interval '1 day'),
           g, 100 + g % 10, 1 from generate_series(1, 20) g;
insert into payment (customer_id, staff_id, rental_id, amount, payment_date)
    select 100 + g % 10, 1, g, g, '2022-01-25 00:00:00+00'::timestamptz + g * interval '4 days'
      from generate_series(1, 20) g;
update customer set active = 1 where customer_id % 2 = 0;
