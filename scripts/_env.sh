# Sourced by the other scripts: goes to the repository's root and makes .venv with one of pyproject's extras in it.
# Nothing is installed again until pyproject.toml, constraints.txt or the interpreter changes.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_env() { # make_env [EXTRA]
    local extra=${1:-} python=${PYTHON:-} candidate stamp want
    if [ -z "$python" ]; then
        for candidate in python3 python3.13 python3.12 python3.11; do
            if command -v "$candidate" >/dev/null && "$candidate" -c \
                'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
    fi
    if [ -z "$python" ]; then
        echo "Ringcast needs Python 3.11, 3.12 or 3.13; set PYTHON to one." >&2
        return 1
    fi
    want="$("$python" -c 'import sys; print(sys.executable, sys.version)') $PWD $(cat pyproject.toml constraints.txt | sha256sum)"
    stamp=.venv/installed${extra:+-$extra}
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return 0
    fi
    echo "Setting up .venv (once; some minutes)..." >&2
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        "$python" -m venv --clear .venv
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}"
    rm -f .venv/installed*
    printf '%s' "$want" >"$stamp"
    if [ -n "$extra" ]; then # whatever an extra needs, the plain package needs too
        printf '%s' "$want" >.venv/installed
    fi
}
