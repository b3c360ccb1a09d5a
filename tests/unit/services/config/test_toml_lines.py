"""The line scanner against everything TOML lets people write."""

from __future__ import annotations

from services.config.toml_lines import dotted, key_lines

TEXT = '''\
# comment with [brackets] and = signs
top = 1
"quoted key" = 2
[a]
b.c = [
  "]", # a bracket in a string and one in a comment ]
  2,
]
text = """
[not.a.table]
x = 1 \\""" still inside
"""
d = {inner = 1}
[[t]]
x = 1
[t.sub]
y = \'\'\'
[[t]]
\'\'\'
[[t]]
x = 2 # second
[[t.deep]]
z = 1
[[t.deep]]
z = 2
[a.'odd.name']
k = "]" # ]
'''


def test_every_key_is_found_at_its_line():
    lines = {dotted(path): line for path, line in key_lines(TEXT).items()}
    expected = {
        "top": 2,
        "quoted key": 3,
        "a": 4,
        "a.b.c": 5,
        "a.text": 9,
        "a.d": 13,
        "t[0]": 14,
        "t[0].x": 15,
        "t[0].sub": 16,
        "t[0].sub.y": 17,
        "t[1]": 20,
        "t[1].x": 21,
        "t[1].deep[0].z": 23,
        "t[1].deep[1].z": 25,
        "a.odd.name": 26,
        "a.odd.name.k": 27,
    }
    assert {key: lines.get(key) for key in expected} == expected
    assert "not" not in {str(path[0]) for path in key_lines(TEXT)}


def test_windows_line_ends_count_once():
    assert key_lines("[a]\r\nb = 1\r\nc = 2\r\n")[("a", "c")] == 3
