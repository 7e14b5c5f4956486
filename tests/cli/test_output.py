from __future__ import annotations

import io

from rich.text import Text

from headrace.cli.output import console


def test_text_is_written_as_it_is() -> None:
    out = io.StringIO()
    line = "[bold]not markup[/bold] :smile: http://x/ 123 " + "long " * 60
    console(out).print(line)
    assert out.getvalue() == line + "\n"


def test_no_colour_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    console(out).print(Text("ready", style="bold green"))
    assert out.getvalue() == "ready\n"
