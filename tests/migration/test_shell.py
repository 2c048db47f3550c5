"""The reader of shell scripts gives the words that bash would pass on, and stays within its bounds."""

from __future__ import annotations

import subprocess

import pytest

from grpo_megatron.migration.shell import commands
from grpo_megatron.untrusted import ReadError

# (script, words of its last command; None: as bash has them)
SCRIPTS = {
    "nested defaults": 'B=2; A=${TP:-$B}; C=${X:-${Y:-"${A}4"}}\necho tp=$A c=${C}',
    "set and empty": 'E=; echo ${E:-a} "${E-b}" ${E:+c} ${U+d} ${U:=e}x "$E" "${E:+_${E}}"',
    "arithmetic": "a=1024 b=3; n=$(( (a + b) * 2 / ${b} % 1000 ))\necho $((n-1)) $(( ${m:-4}*$b ))",
    "quotes": """A='$x' B="a \\"b\\" \\\\ c"; echo "$A" "$B" 'don'"'"'t' a\\ b "['${U:-/d}/x', '$A']" """,
    "continued": 'A="one\\\ntwo"; echo a.b=1 \\\n  c=2 # a comment\n',
    "arrays": 'A=(x.y=1 "p q"  # first\n z)\nA+=(w)\necho "${A[@]}" e',
    "several words": 'A="\n  a.b=1 \\\n  c.d=2"\necho $A "$A"',
    "here": "cat > /dev/null <<'EOF'\ndon't\na=5\nEOF\nA=1\necho $A",
    "redirected": "A=1 2> /dev/null; echo a 2>&1 b > /dev/stdout",
    "inner": "bash -c \"echo a 'b c'\"",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    script = 'echo() { for one in "$@"; do printf "%s\\0" "$one"; done; }; export -f echo\n' + SCRIPTS[name]
    told = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={}, timeout=20).stdout
    words = [words for words in commands(SCRIPTS[name], {}) if words[0] == "echo"][-1]
    assert words[1:] == told.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("A=$(nproc)\nx a.b=${A:-1}", "a.b=$(nproc)"),
        ("x a.b=${U} c=1", "a.b=${U}"),
        ("A=1\nif probe; then A=2; fi\nx a.b=$A", "a.b=${A:set-by-a-branch}"),
        ("A=1\nif probe; then A=1; fi\nB=2\nx a.b=$A$B", "a.b=12"),
        ("A=1\n[ $U = 1 ] && B=2\nA=3; x a.b=$A", "a.b=3"),
        ("A=(x)\nif probe; then A+=(a.b=2); fi\nx ${A[@]}", "a.b=2${:set-by-a-branch}"),
        ("A=1\n[ $U = 1 ] && A=2\nx a.b=$A", "a.b=${A:set-by-a-branch}"),
        ("case $U in a) A=2 ;; esac\nx a.b=$A", "a.b=${A:set-by-a-branch}"),
        ("x a.b=$((2**9))", "a.b=$((2**9))"),
        ("x a.b=$((1 / 0))", "a.b=$((1 / 0))"),
        ("x a.b=${A,,}", "a.b=${A,,}"),
    ],
)
def test_what_is_not_known_stays_as_it_is_written(script: str, word: str) -> None:
    assert word in commands(script, {})[-1]


def test_variables_from_outside() -> None:
    assert commands("D=${D:-$(nproc)}; x n=$D", {"D": "8"})[-1] == ["x", "n=8"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 60, "expand to more than"),
        ("A=(a)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 60, "expand to more than"),
        ('X=\'bash -c "$X"\'\nbash -c "$X"', "expand to more than"),
        ("x " + "${A:-" * 5000 + "}" * 5000, "expansions within each other"),
        ("x " + "$(" * 60_000, "is missing behind"),
        ("x '", "No closing quotation"),
        ("x <<EOF\na", "No closing quotation"),
    ],
)
def test_a_script_without_an_end_is_refused(script: str, message: str) -> None:
    with pytest.raises(ReadError, match=message):
        commands(script, {})
    assert commands("x a=$((" + "1+" * 50_000 + "1))", {})[0][1].startswith("a=$((1+1")
