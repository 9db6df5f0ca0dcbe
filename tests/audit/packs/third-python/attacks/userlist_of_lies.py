# class: forged standard values
"""A collections.UserList whose data is the lie: the container's own comparison asks the part."""

tail("""
    class _Equal(list):
        def __eq__(self, other):
            return True
        def __ne__(self, other):
            return False
        __hash__ = None
""")
body("""
    import collections
    value = collections.UserList()
    value.data = _Equal()
    return value
""")
