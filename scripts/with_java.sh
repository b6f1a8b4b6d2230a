#!/bin/sh
# Runs a command with a Java that Spark can use: scripts/with_java.sh COMMAND …
#
# Takes the first recent Java of JAVA_HOME, the path and the usual directories. Without Java, installs
# the distribution's headless Java, or prints the command to run.
set -eu
oldest=17

fail() {
    echo "streamer: Spark needs Java $oldest or newer; $*" >&2
    exit 1
}

is_usable() {
    version=$("$1" -version 2>&1 |
        sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9][0-9]*\).*/\2/p' | head -n 1)
    [ "${version:-0}" -ge "$oldest" ]
}

# Leaves JAVA_HOME for Spark: unset means the java on the path.
find_java() {
    if [ -n "${JAVA_HOME:-}" ] && is_usable "$JAVA_HOME/bin/java"; then return 0; fi
    unset JAVA_HOME
    if command -v java >/dev/null && is_usable java; then return 0; fi
    for home in /usr/lib/jvm/* /Library/Java/JavaVirtualMachines/*/Contents/Home \
        /opt/homebrew/opt/openjdk* /usr/local/opt/openjdk*; do
        if [ -x "$home/bin/java" ] && is_usable "$home/bin/java"; then
            export JAVA_HOME="$home"
            return 0
        fi
    done
    return 1
}

# Prints the first package that the package manager knows, or else the first name.
first_of() {
    knows=$1
    first=$2
    shift
    for package in "$@"; do
        if $knows "$package" >/dev/null 2>&1; then
            echo "$package"
            return
        fi
    done
    echo "$first"
}

# Prints the command that installs Java here, on a known system.
installation() {
    if command -v apt-get >/dev/null; then
        echo "apt-get install -y --no-install-recommends $(first_of 'apt-cache show' \
            openjdk-17-jre-headless openjdk-21-jre-headless openjdk-25-jre-headless)"
    elif command -v dnf >/dev/null; then
        echo "dnf install -y $(first_of 'dnf info' \
            java-17-openjdk-headless java-21-openjdk-headless java-latest-openjdk-headless)"
    elif command -v apk >/dev/null; then
        echo "apk add $(first_of 'apk info' openjdk17-jre-headless openjdk21-jre-headless)"
    elif command -v pacman >/dev/null; then
        echo "pacman -S --noconfirm jre17-openjdk-headless"
    elif command -v zypper >/dev/null; then
        echo "zypper --non-interactive install java-17-openjdk-headless"
    elif command -v brew >/dev/null; then
        echo "brew install openjdk@17"
    fi
}

if ! find_java; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq >/dev/null || true
    fi
    install=$(installation)
    case "$(id -u) $install" in
    *" ") fail "install it, or set JAVA_HOME" ;;
    "0 brew"*) fail "run as an ordinary user: $install" ;;
    "0 "*)
        echo "no Java yet: $install" >&2
        $install >/dev/null </dev/null || fail "this failed: $install"
        ;;
    *" brew"*) fail "run: $install" ;;
    *) fail "run: sudo $install" ;;
    esac
    find_java || fail "and \"$install\" installed an older one"
fi
exec "$@"
