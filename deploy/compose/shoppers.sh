#!/bin/sh
# Write to both sources until stopped.
set -eu
while sleep 0.2; do
    for host in eu us; do
        psql --quiet --host "$host" --username postgres --dbname shop --command "
            with ordered as (
                insert into orders (customer_id, total)
                select 1 + floor(random() * 50000)::int, round((random() * 500)::numeric, 2)
                from generate_series(1, 5))
            update orders set state = 'shipped' where id in (
                select id from orders where state = 'open' order by id limit 3)" || true
    done
done
