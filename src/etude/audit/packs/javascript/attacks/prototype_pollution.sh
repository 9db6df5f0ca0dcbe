# class: patched verifier
# item: J4
# Keys that lead to a prototype in plain data.
cat >> "$ETUDE_PATH" <<'END'
const text = '{"__proto__": {"strictEqual": 1}, "constructor": {"prototype": {"strictEqual": 1}}}'
module.exports.total = () => JSON.parse(text)
END
