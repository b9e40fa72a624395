# Sourced, by setup and setup-faults: installs Debian packages where that may be done, and says what is missing and what is lost without it.
# shellcheck shell=bash

say() { printf '%s\n' "setup: $*" >&2; }

lost() {
    case "$1" in
        bubblewrap) echo "slots fall back to the weaker mode 'uid' (root only); the mode 'bwrap', networkless slots and the tests of both are lost" ;;
        tmux) echo "terminals in slots (the tool 'tmux') are lost" ;;
        vim | less) echo "the examples and tests of terminals in slots cannot run" ;;
        passt | libnftables1) echo "slots cannot have networks of their own ('network: internet'), and the tests of these are lost" ;;
        iproute2) echo "the tests of slots with networks of their own are lost" ;;
        curl) echo "the README's curl examples cannot run" ;;
        python3) echo "slots have no Python of their own: the demo's project cannot run in them" ;;
        faketime) echo "the crash harness cannot set the service's clock: its report names that kind of fault as not injected" ;;
    esac
}

has() {
    case "$1" in
        bubblewrap) command -v bwrap >/dev/null ;;
        python3) [ -x /usr/bin/python3 ] || [ -x /usr/local/bin/python3 ] ;;  # slots see /usr, and nobody's home
        passt) command -v pasta >/dev/null ;;
        libnftables1) compgen -G '/usr/lib*/*/libnftables.so.1' >/dev/null || compgen -G '/usr/lib*/libnftables.so.1' >/dev/null ;;
        iproute2) command -v ip >/dev/null ;;
        faketime) compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# Have these packages, as far as this user can.
want() {
    local package wanted=()
    for package in "$@"; do
        has "$package" || wanted+=("$package")
    done
    if [ "${#wanted[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${wanted[*]}"
        export DEBIAN_FRONTEND=noninteractive
        if ! { apt-get update -q && apt-get install -y -q --no-install-recommends "${wanted[@]}"; } >&2; then
            say "apt-get could not install ${wanted[*]}"
        fi
    fi
    for package in "${wanted[@]}"; do
        has "$package" || say "missing: $package ($(lost "$package")). To install it: apt-get install $package"
    done
}
