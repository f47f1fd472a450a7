# Prepares the Python environment. Sourced, so that the activated environment stays: . scripts/install.sh EXTRAS
#
# What it does: uses the active virtual environment, else .venv (made here if need be), and installs this package with
#   the given extras (such as "highs" or "highs,dev") at the versions of constraints.txt.
# What to expect: minutes the first time, no time at all once the environment's stamp matches setup.py, constraints.txt
#   and the extras. A torch that is already there is kept, whatever its version.

rlfreeze_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Name of a Python 3.11 or newer; one that already has a CUDA torch comes first.
rlfreeze_find_python() {
    local name found=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        command -v "$name" >/dev/null 2>&1 || continue
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if rlfreeze_has_cuda_torch "$name"; then
            echo "$name"
            return
        fi
        found="${found:-$name}"
    done
    echo "$found"
}

rlfreeze_has_cuda_torch() {
    "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None and torch.version.hip is None)' >/dev/null 2>&1
}

rlfreeze_install() {
    local extras="$1" venv stamp wanted extra python started log torch_kept constraints
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        VIRTUAL_ENV="$CONDA_PREFIX"
    fi
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        venv="$rlfreeze_root/.venv"
        if [ ! -x "$venv/bin/python" ]; then
            python="$(rlfreeze_find_python)"
            if [ -z "$python" ]; then
                echo "install: no Python 3.11 or newer found; install one, then run this again" >&2
                return 1
            fi
            echo "install: creating .venv with $("$python" --version)"
            if rlfreeze_has_cuda_torch "$python"; then
                # Lets the new environment see the torch that fits this machine's driver.
                "$python" -m venv --system-site-packages "$venv" || return 1
            elif ! "$python" -m venv "$venv"; then
                rm -rf "$venv"
                echo "install: $python cannot make virtual environments; install its venv module" >&2
                return 1
            fi
        fi
        # shellcheck disable=SC1091
        . "$venv/bin/activate"
    fi

    stamp="$VIRTUAL_ENV/.rlfreeze_ds-installed"
    wanted="$(cat "$rlfreeze_root/setup.py" "$rlfreeze_root/constraints.txt" | sha256sum | cut -d' ' -f1) $rlfreeze_root"
    if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ]; then
        local missing=""
        for extra in ${extras//,/ }; do
            grep -qx "$extra" "$stamp" || missing="$extra"
        done
        [ -n "$missing" ] || return 0
    fi

    started=$SECONDS
    log="$VIRTUAL_ENV/rlfreeze_ds-install.log"
    constraints="$VIRTUAL_ENV/rlfreeze_ds-constraints.txt"
    : >"$log"
    cp "$rlfreeze_root/constraints.txt" "$constraints"
    torch_kept="$(python -c 'import torch; print(torch.__version__)' 2>/dev/null || true)"
    if [ -n "$torch_kept" ]; then
        echo "install: keeping torch $torch_kept"
        # torch pins its own sympy exactly, so another torch needs another one than ours.
        case "$torch_kept" in
            "$(sed -n 's/^torch==//p' "$constraints")" | "$(sed -n 's/^torch==//p' "$constraints")"+*) ;;
            *) sed -i '/^sympy==/d' "$constraints" ;;
        esac
        sed -i "s/^torch==.*/torch==$torch_kept/" "$constraints"
    else
        # On its own and by exact version: a machine that offers a build of it for CPUs gets that one.
        echo "install: torch (1 of 2) ..."
        rlfreeze_pip "$log" "$(grep '^torch==' "$constraints")" -c "$constraints" || return 1
    fi
    echo "install: rlfreeze_ds[$extras] and what it needs (2 of 2) ..."
    rlfreeze_pip "$log" -c "$constraints" -e "$rlfreeze_root[$extras]" || return 1
    printf '%s\n' "$wanted" ${extras//,/ } >"$stamp"
    echo "install: done in $((SECONDS - started)) s"
}

rlfreeze_pip() {
    local log="$1"
    shift
    if ! python -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "install: pip failed; the whole log is $log" >&2
        return 1
    fi
}

rlfreeze_install "${1:?usage: . scripts/install.sh EXTRAS}"
