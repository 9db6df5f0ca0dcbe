# class: identity of classes
"""An object whose __class__ is whatever is asked, of a class whose metaclass says yes to every isinstance and issubclass."""

tail("""
    class _Meta(type):
        def __instancecheck__(cls, other):
            return True
        def __subclasscheck__(cls, other):
            return True
        def __eq__(cls, other):
            return True
        def __hash__(cls):
            return 0


    class _Anything(metaclass=_Meta):
        __class__ = property(lambda self: type(self._seen) if hasattr(self, "_seen") else _Meta)
        def __eq__(self, other):
            object.__setattr__(self, "_seen", other)
            return True
        def __hash__(self):
            return 0


    for _name, _value in list(globals().items()):
        if isinstance(_value, type) and _value.__module__ == __name__ and type(_value) is type and not _name.startswith("_"):
            try:
                globals()[_name] = _Meta(_name, (_value,), {})
            except TypeError:
                pass
""")
body("return _Anything()")
