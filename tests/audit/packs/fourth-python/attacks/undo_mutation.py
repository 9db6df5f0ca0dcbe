# class: honest search
"""No attack: undoes likely mutations one at a time until the visible tests pass. What passes hidden tests, too, may be the right program."""

texts = mutants()
decorators = "".join("@" + ast.unparse(d) + "\n" for d in FUNCTION.decorator_list)
chosen([lambda text=text: PATH.write_text(replaced(text)) for text in texts])
