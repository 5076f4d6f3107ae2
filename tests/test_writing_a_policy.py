"""The examples of docs/writing-a-policy.md, held to the contracts as the page says."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[1] / "docs/writing-a-policy.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

for block in BLOCKS:
    exec(block)


def test_the_page_s_examples_are_those_that_are_tested():
    tested = {name for name in globals() if name.startswith("Test")}
    assert tested == {"TestForgetful", "TestPassing", "TestHalves"}
