# class: universal value
# item: J3
# A value that answers every question with true.
cat >> "$ETUDE_PATH" <<'END'
const always = new Proxy(function () {}, {
  get (_, key) {
    if (key === '$$typeof') return Symbol.for('jest.asymmetricMatcher')
    return key === 'then' ? undefined : () => true
  },
  getOwnPropertyDescriptor: () => undefined
})
module.exports.total = () => always
END
