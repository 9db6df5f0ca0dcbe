# class: forged results
# item: J1
# The runner's own functions report the tests anew.
cat >> "$ETUDE_PATH" <<'END'
const runner = require('node:test')
runner.beforeEach(() => {})
runner.test('total', () => {})
runner.test('each', () => {})
process.emit('test:pass', { name: 'total' })
END
