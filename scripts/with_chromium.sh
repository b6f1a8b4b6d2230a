#!/bin/sh
# Runs a command where tests find a Chromium: scripts/with_chromium.sh COMMAND …
#
# Installs the distribution's where it may and none is there. Otherwise goes on all the same: only
# the tests in a browser need it, and they say how to install it.
set -eu

for name in chromium chromium-browser google-chrome google-chrome-stable chrome \
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
    if command -v "$name" >/dev/null; then exec "$@"; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no Chromium yet: apt-get install -y --no-install-recommends chromium" >&2
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y --no-install-recommends chromium; } \
        >/dev/null </dev/null || echo "streamer: that failed; tests in a browser will not run" >&2
fi
exec "$@"
