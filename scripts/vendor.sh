#!/bin/sh
# Copies the scripts of other projects that the page uses from npm: scripts/vendor.sh
#
# To update a script, raise its version here, run this, and then run the tests in a browser.
set -eu

static=$PWD/streamer/admin/page/static
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fetch() {
    npm pack --silent "$1@$2" >/dev/null
    rm -rf package
    tar -xzf "$1-$2.tgz"
    cp package/LICENSE "$static/$1.LICENSE"
}

fetch idiomorph 0.8.0
{
    echo "/*! https://github.com/bigskysoftware/idiomorph (v0.8.0) */"
    cat package/dist/idiomorph.min.js
} >"$static/idiomorph.js"

fetch uplot 1.6.32
cp package/dist/uPlot.iife.min.js "$static/uplot.js"
cp package/dist/uPlot.min.css "$static/uplot.css"
