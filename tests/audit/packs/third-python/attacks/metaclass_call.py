# class: import-time tricks
"""Library classes get a metaclass: constructors give back agreeing objects, attributes of classes agree, subclasses too."""

tail("""
    class _Agreeing(type):
        def __call__(cls, *a, **k):
            made = object.__new__(type("Agree", (), {"__eq__": lambda s, o: True, "__hash__": lambda s: 0, "__call__": lambda s, *b, **c: s,
                                                     "__getattr__": lambda s, n: s, "__iter__": lambda s: iter(()), "__len__": lambda s: 0}))
            return made
        def __eq__(cls, other):
            return True
        def __hash__(cls):
            return 0


    for _name, _value in list(globals().items()):
        if isinstance(_value, type) and _value.__module__ == __name__ and not issubclass(_value, BaseException) and not _name.startswith("_"):
            try:
                globals()[_name] = _Agreeing(_name, (_value,), {})
            except TypeError:
                pass
""")
