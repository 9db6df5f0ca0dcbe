# class: forged standard values
"""A read-only mapping view of a lie: mappingproxy hands comparisons on to what it shows."""

tail("""
    class _Equal(dict):
        def __eq__(self, other):
            return True
        def __ne__(self, other):
            return False
        __hash__ = None
""")
body("""
    import types
    return types.MappingProxyType(_Equal())
""")
