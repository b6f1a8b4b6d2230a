-- The structure of GitLab, a large Rails application, written anew in part.
-- The public definitions are in its db/structure.sql, under the MIT licence.

create schema gitlab_partitions_dynamic;
create schema gitlab_partitions_static;

create function next_traversal_ids_sibling(traversal_ids integer[]) returns integer[]
    language plpgsql immutable strict as $$
begin
    return traversal_ids[1:array_length(traversal_ids, 1) - 1]
        || array[traversal_ids[array_length(traversal_ids, 1)] + 1];
end $$;
create function assign_ci_builds_id_value() returns trigger language plpgsql as $$
begin
    if new.id is null then new.id := nextval('ci_builds_id_seq'::regclass); end if;
    return new;
end $$;
create function insert_into_loose_foreign_keys_deleted_records() returns trigger
    language plpgsql as $$
begin
    insert into loose_foreign_keys_deleted_records (fully_qualified_table_name, primary_key_value)
        select tg_table_schema || '.' || tg_table_name, old_table.id from old_table;
    return null;
end $$;

create table users (
    id bigserial primary key,
    email character varying default ''::character varying not null,
    encrypted_password character varying default ''::character varying not null,
    sign_in_count integer default 0,
    current_sign_in_ip inet,
    created_at timestamp without time zone,
    updated_at timestamp without time zone,
    name character varying default ''::character varying not null,
    admin boolean default false not null,
    projects_limit integer not null,
    username character varying,
    state character varying,
    color_scheme_id integer default 1 not null,
    otp_grace_period_started_at timestamp without time zone,
    external boolean default false,
    user_type smallint default 0,
    color_mode_id smallint default 1 not null,
    private_profile boolean default false not null,
    onboarding_in_progress boolean default false not null,
    incoming_email_token character varying,
    constraint check_7bde697e8e check (char_length(state) <= 255),
    constraint check_users_projects_limit check (projects_limit >= 0) not valid
);
create table namespaces (
    id bigserial primary key,
    name character varying not null,
    path character varying not null,
    owner_id bigint,
    type character varying default 'User'::character varying not null,
    description character varying default ''::character varying not null,
    visibility_level integer default 20 not null,
    parent_id bigint references namespaces,
    traversal_ids integer[] default '{}'::integer[] not null,
    shared_runners_enabled boolean default true not null,
    description_html text,
    runners_token_encrypted character varying,
    created_at timestamp with time zone default now(),
    constraint check_2eae3bdf93 check (visibility_level in (0, 10, 20))
);
create table projects (
    id bigserial primary key,
    name character varying,
    path character varying,
    description text,
    creator_id integer,
    namespace_id bigint not null,
    last_activity_at timestamp without time zone,
    star_count integer default 0 not null,
    archived boolean default false not null,
    repository_storage character varying default 'default'::character varying not null,
    storage_version smallint,
    has_external_issue_tracker boolean,
    merge_requests_ff_only_enabled boolean default false,
    suggestion_commit_message character varying(255),
    hidden boolean default false not null,
    constraint check_fa75869cb1 check (namespace_id is not null)
);
create table project_settings (
    project_id bigint primary key references projects on delete cascade,
    created_at timestamp with time zone not null,
    push_rule_id bigint,
    squash_option smallint default 3,
    target_platforms character varying[] default '{}'::character varying[] not null,
    jitsu_key text,
    cve_id_request_enabled boolean default true not null,
    merge_commit_template text,
    only_allow_merge_if_all_status_checks_passed boolean default false not null,
    constraint check_3a03e7557a check (char_length(jitsu_key) <= 100),
    constraint check_b09644994b check (char_length(merge_commit_template) <= 500)
);
create table project_authorizations (
    user_id bigint not null references users on delete cascade,
    project_id bigint not null references projects on delete cascade,
    access_level integer not null,
    is_unique boolean,
    primary key (user_id, project_id, access_level)
);
create table milestones (
    id bigserial primary key,
    title character varying not null,
    project_id bigint references projects on delete cascade,
    group_id bigint references namespaces on delete cascade,
    due_date date,
    start_date date,
    lock_version integer default 0 not null,
    constraint check_08e9c27987 check (num_nonnulls(group_id, project_id) = 1)
);
create table issues (
    id bigserial primary key,
    title character varying,
    author_id bigint references users on delete set null,
    project_id bigint references projects on delete cascade,
    namespace_id bigint not null references namespaces on delete cascade,
    description text,
    milestone_id bigint,
    iid integer,
    relative_position integer,
    due_date date,
    confidential boolean default false not null,
    state_id smallint default 1 not null,
    weight integer,
    blocking_issues_count integer default 0 not null,
    upvotes_count integer default 0 not null,
    work_item_type_id bigint not null,
    created_at timestamp without time zone default now() not null,
    constraint check_2addf801cd check (work_item_type_id is not null)
);
create table issue_search_data (
    project_id bigint not null,
    issue_id bigint not null,
    created_at timestamp with time zone default now() not null,
    search_vector tsvector,
    namespace_id bigint,
    primary key (project_id, issue_id)
) partition by hash (project_id);
create table gitlab_partitions_static.issue_search_data_00 partition of issue_search_data
    for values with (modulus 2, remainder 0);
create table gitlab_partitions_static.issue_search_data_01 partition of issue_search_data
    for values with (modulus 2, remainder 1);
create table labels (
    id bigserial primary key,
    title character varying,
    color character varying,
    project_id bigint,
    group_id bigint,
    template boolean default false,
    lock_on_merge boolean default false not null,
    constraint check_labels_color check (color ~ '^#[0-9A-Fa-f]{6}$'::text)
);
create table notes (
    id bigserial,
    note text,
    noteable_type character varying,
    noteable_id bigint,
    author_id integer,
    project_id bigint,
    st_diff jsonb,
    system boolean default false not null,
    discussion_id character varying,
    confidential boolean,
    internal boolean default false not null,
    updated_at timestamp(6) without time zone default now()
);
alter table notes add constraint notes_pkey primary key (id);
create table application_settings (
    id serial primary key,
    default_branch_protection_defaults jsonb default '{}'::jsonb not null,
    rate_limits jsonb default '{"a": [1, 2]}'::jsonb not null,
    valid_runner_registrars character varying[] default '{project,group}'::character varying[],
    asset_proxy_whitelist text,
    default_artifacts_expire_in character varying default '0'::character varying not null,
    container_registry_expiration_policies_worker_capacity integer default 4 not null,
    minimum_password_length integer default 8 not null,
    constraint app_settings_container_reg_policies_positive
        check (container_registry_expiration_policies_worker_capacity >= 0),
    constraint check_application_settings_rate_limits_is_hash
        check (jsonb_typeof(rate_limits) = 'object'::text)
);

create sequence ci_builds_id_seq;
create table p_ci_builds (
    id bigint default nextval('ci_builds_id_seq'::regclass) not null,
    partition_id bigint not null,
    status character varying,
    finished_at timestamp without time zone,
    project_id bigint,
    name character varying,
    options text,
    allow_failure boolean default false not null,
    stage_idx integer,
    tag boolean,
    type character varying,
    lock_version integer default 0,
    coverage double precision,
    scheduling_type smallint,
    upstream_pipeline_id bigint,
    upstream_pipeline_partition_id bigint,
    constraint check_1e2fbd1b39 check (lock_version is not null),
    primary key (id, partition_id)
) partition by list (partition_id);
create table ci_builds partition of p_ci_builds for values in ('100');
create table gitlab_partitions_dynamic.ci_builds_101 (like p_ci_builds including all);
alter table p_ci_builds attach partition gitlab_partitions_dynamic.ci_builds_101
    for values in ('101', '102');
create table p_ci_build_tags (
    id bigint generated by default as identity,
    tag_id bigint not null,
    build_id bigint not null,
    partition_id bigint not null,
    primary key (id, partition_id)
) partition by list (partition_id);
create table gitlab_partitions_dynamic.ci_build_tags_100 partition of p_ci_build_tags
    for values in ('100');
create table gitlab_partitions_dynamic.ci_build_tags_101 partition of p_ci_build_tags
    for values in ('101', '102');
create table audit_events (
    id bigserial not null,
    author_id bigint not null,
    entity_id bigint not null,
    entity_type character varying not null,
    details text,
    ip_address inet,
    created_at timestamp without time zone not null,
    target_details text,
    constraint check_492aaa021d check (char_length(entity_type) <= 5500),
    primary key (id, created_at)
) partition by range (created_at);
create table gitlab_partitions_dynamic.audit_events_000000 partition of audit_events
    for values from (minvalue) to ('2025-01-01 00:00:00');
create table gitlab_partitions_dynamic.audit_events_202501 partition of audit_events
    for values from ('2025-01-01 00:00:00') to ('2025-02-01 00:00:00');
create table gitlab_partitions_dynamic.audit_events_202502 partition of audit_events
    for values from ('2025-02-01 00:00:00') to ('2025-03-01 00:00:00');
create table loose_foreign_keys_deleted_records (
    id bigserial not null,
    partition bigint default 1 not null,
    primary_key_value bigint not null,
    status smallint default 1 not null,
    created_at timestamp with time zone default now() not null,
    fully_qualified_table_name text not null,
    consume_after timestamp with time zone default now(),
    constraint check_1a541f3235 check (char_length(fully_qualified_table_name) <= 150),
    primary key (partition, id)
) partition by list (partition);
create table gitlab_partitions_static.loose_foreign_keys_deleted_records_1
    partition of loose_foreign_keys_deleted_records for values in ('1');

create unique index index_users_on_email on users (email);
create unique index index_users_on_incoming_email_token on users (incoming_email_token);
create index index_on_users_lower_username on users (lower(username::text));
create index index_on_users_lower_email on users (lower(email::text));
create index index_users_on_state_and_user_type on users (state, user_type);
create index index_users_on_name_pattern on users (name varchar_pattern_ops);
create index index_users_for_active_billable_users on users (id)
    where state::text = 'active'::text and user_type in (0, 6, 4, 13) and user_type <> 4;
create unique index index_namespaces_name_parent_id_type on namespaces (name, parent_id, type);
create index index_namespaces_on_traversal_ids on namespaces using gin (traversal_ids);
create index index_btree_namespaces_traversal_ids on namespaces (traversal_ids);
create index index_groups_on_path_and_id on namespaces (path, id) where type::text = 'Group'::text;
create index index_namespaces_next on namespaces (id desc nulls last) include (parent_id, owner_id);
create unique index index_projects_on_namespace_id_and_path
    on projects (namespace_id, coalesce(path, ''::character varying));
create index index_projects_on_last_activity_at_and_id on projects (last_activity_at, id)
    where not hidden;
create index index_projects_api_path_id_desc on projects (path, id desc);
create unique index index_issues_on_project_id_and_iid on issues (project_id, iid);
create index idx_issues_on_project_id_and_due_date on issues (project_id, due_date, id, state_id)
    where due_date is not null;
create index index_issues_on_title_words on issues
    using gin (to_tsvector('english'::regconfig, coalesce(title, ''::character varying)::text));
create index index_issue_search_data_on_search_vector on issue_search_data using gin (search_vector);
create unique index index_labels_on_group_id_and_title_unique on labels (group_id, title)
    where project_id is null;
create index index_notes_on_created on notes using brin (updated_at) with (pages_per_range = 32);
create index index_notes_on_st_diff on notes using gin (st_diff jsonb_path_ops);
create index p_ci_builds_status_type_idx on p_ci_builds (status, type, stage_idx desc nulls last)
    where type::text = 'Ci::Build'::text;
create unique index p_ci_build_tags_build_tag on p_ci_build_tags (tag_id, build_id, partition_id);
create index analytics_index_audit_events_on_created_at on audit_events (created_at, author_id);

alter table namespaces add constraint fk_namespaces_owner foreign key (owner_id)
    references users on delete cascade not valid;
alter table projects add constraint fk_projects_namespace foreign key (namespace_id)
    references namespaces on delete restrict;
alter table issues add constraint fk_96b1dd429c foreign key (milestone_id)
    references milestones on delete set null;
alter table p_ci_build_tags add constraint fk_rails_8284d35c66 foreign key (build_id, partition_id)
    references p_ci_builds (id, partition_id) on update cascade on delete cascade;
alter table p_ci_builds add constraint fk_p_ci_builds_project foreign key (project_id)
    references projects on delete cascade;
alter table milestones add constraint milestones_dates exclude using gist
    (daterange(start_date, due_date) with &&) where (lock_version = 7);
alter table users alter column username set statistics 500;
comment on table projects is 'Repositories and what belongs to them';
comment on column users.user_type is '0: a person';

create trigger assign_p_ci_builds_id_trigger before insert on p_ci_builds
    for each row execute function assign_ci_builds_id_value();
create trigger projects_loose_fk_trigger after delete on projects
    referencing old table as old_table
    for each statement execute function insert_into_loose_foreign_keys_deleted_records();
create view postgres_partitions as
    select oid, relname from pg_class where relispartition and relkind = 'r';

-- rows
insert into users (email, name, projects_limit, username, state, current_sign_in_ip)
    select 'u' || g || '@example.org', 'User ' || g, g, 'User' || g, 'active', '10.0.0.1'
      from generate_series(1, 20) g;
insert into namespaces (name, path, owner_id, type, parent_id, traversal_ids)
    select 'n' || g, 'n' || g, g, 'Group', nullif(g - 1, 0), array[g - 1, g]
      from generate_series(1, 20) g;
insert into projects (name, path, namespace_id, last_activity_at)
    select 'p' || g, 'p' || g, g, now() from generate_series(1, 20) g;
insert into project_settings (project_id, created_at, target_platforms)
    select g, now(), array['ios', 'a,b'] from generate_series(1, 20) g;
insert into project_authorizations select g, g, 30 from generate_series(1, 20) g;
insert into milestones (title, project_id, start_date, due_date)
    values ('first', 1, '2025-01-01', '2025-02-01');
insert into issues (title, author_id, project_id, namespace_id, iid, work_item_type_id, milestone_id)
    select 'Issue ' || g, g, g, g, 1, 1, 1 from generate_series(1, 20) g;
insert into issue_search_data (project_id, issue_id, search_vector)
    select g, g, to_tsvector('english', 'words of issue ' || g) from generate_series(1, 20) g;
insert into labels (title, color, group_id) select 'l' || g, '#0033CC', g from generate_series(1, 5) g;
insert into notes (note, noteable_type, noteable_id, st_diff)
    select 'note', 'Issue', g, jsonb_build_object('n', g) from generate_series(1, 20) g;
insert into application_settings default values;
insert into p_ci_builds (partition_id, status, project_id, type)
    select 100 + g % 3, 'success', g, 'Ci::Build' from generate_series(1, 20) g;
insert into p_ci_build_tags (tag_id, build_id, partition_id)
    select 1, id, partition_id from p_ci_builds;
insert into audit_events (author_id, entity_id, entity_type, created_at)
    select g, g, 'Project', '2024-12-25'::timestamp + g * interval '2 days'
      from generate_series(1, 20) g;
update users set state = 'blocked' where id % 3 = 0;
update p_ci_builds set partition_id = 102 where partition_id = 100 and id % 2 = 0;
delete from projects where id = 20;
