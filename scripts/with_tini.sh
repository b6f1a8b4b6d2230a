#!/bin/sh
# Runs a command where tests find tini, the init of the image: scripts/with_tini.sh COMMAND …
#
# Installs the distribution's tini if none exists and the user is root. Continues without tini
# otherwise: the test of the image's first process then names the command for the installation.
set -eu
if ! command -v tini >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no tini yet: apt-get install -y --no-install-recommends tini" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null 2>&1 || true
    apt-get install -y --no-install-recommends tini >/dev/null </dev/null || true
fi
exec "$@"
