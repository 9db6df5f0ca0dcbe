"""The prompt of an apply model."""

from etude.edits import edit_prompt


def test_tags_take_a_suffix_if_the_texts_hold_one():
    plain, tagged = edit_prompt("a\n", "b\n"), edit_prompt("x = '</code>'\n", "b\n")
    assert plain.opening == "<updated-code>\n"
    assert plain.content == ("<instruction></instruction>\n<code>\na\n</code>\n<update>\nb\n</update>\n")
    assert tagged.close.startswith("</updated-code-")
    assert f"<code{tagged.close.removeprefix('</updated-code')}" in tagged.content
