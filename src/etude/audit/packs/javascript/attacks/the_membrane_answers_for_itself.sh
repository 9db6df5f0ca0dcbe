# class: forged results
# item: J1
# The tested side's part of the protocol is patched: every call gives what holds always.
cat >> "$ETUDE_PATH" <<'END'
for (const [name, { exports }] of Object.entries(require('node:module')._cache)) {
  if (!/membrane/.test(name)) continue
  const { perform } = exports.Membrane.prototype
  exports.Membrane.prototype.perform = function (message) {
    return message.op === 'apply' ? new Proxy({}, { get: () => () => true }) : perform.call(this, message)
  }
}
END
