#!/bin/sh
# Runs a command where tests find a Chromium: scripts/with_chromium.sh COMMAND …
#
# Installs the distribution's Chromium if none exists and the user is root. Continues without Chromium
# otherwise: only the tests in a browser need Chromium, and these print the command for the
# installation. Debian's headless shell is the same browser without windows, and takes half of the
# CPU. So beside Debian's Chromium, the script installs the shell in the same version, which changes
# no installed package.
set -eu

quietly() {
    DEBIAN_FRONTEND=noninteractive "$@" >/dev/null 2>&1 </dev/null
}

install() {
    quietly apt-get install -y --no-install-recommends -o Acquire::http::Timeout=10 "$1"
}

may_install=no
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then may_install=yes; fi

if command -v chromium-headless-shell >/dev/null; then exec "$@"; fi
for name in chromium chromium-browser google-chrome google-chrome-stable chrome \
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
    if command -v "$name" >/dev/null; then
        version=$(dpkg-query -W -f '${Version}' chromium 2>/dev/null) || version=
        if [ $may_install = yes ] && [ -n "$version" ]; then
            install "chromium-headless-shell=$version" || true
        fi
        exec "$@"
    fi
done
if [ $may_install = yes ]; then
    echo "no Chromium yet: apt-get install -y --no-install-recommends chromium-headless-shell" >&2
    quietly apt-get update -qq || true
    install chromium-headless-shell || install chromium \
        || echo "streamer: that failed; tests in a browser will not run" >&2
fi
exec "$@"
