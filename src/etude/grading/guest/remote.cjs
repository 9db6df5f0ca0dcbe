// The package's modules in the verifier, as stubs load them; and the tests that stand or fall with what they answer.
'use strict'

const { readFileSync, writeFileSync } = require('node:fs')
const { Membrane } = require('./membrane.cjs')
const { Policy } = require('./policy.cjs')

const ASKED = '/tmp/verify.json' // for frameworks that run tests in a thread or a realm of their own
const FOUND = '/tmp/verified.json'

// Reach the tested process. The policy hears of tests, and says what fails them.
function connect ({ kinds, seconds }, file) {
  const policy = new Policy(kinds, file)
  const membrane = new Membrane({
    fd: 4, first: 1, policy, deadline: Date.now() + 1000 * seconds, keeps: true, gone: (why) => policy.ended(why),
    load: () => { throw new TypeError('nothing is loaded here') }
  })
  globalThis[Symbol.for('etude.remote')] = {
    load (path, module) {
      if (!policy.modules.has(path)) policy.modules.set(path, membrane.ask({ op: 'load', path, module }, path))
      return policy.modules.get(path)
    }
  }
  return policy
}

// At the end of a test: what the tested process did fails it.
function check (policy) {
  const wrong = policy.finish()
  if (wrong) throw new Error(wrong)
}

// In the file that jest and vitest run before a test file; `hooks` are theirs.
function prepare ({ beforeEach, afterEach, afterAll }) {
  const { verify, file } = JSON.parse(readFileSync(ASKED, 'utf8'))
  const policy = connect(verify, file)
  const found = () => ({ fatal: policy.fatal, kinds: policy.known === null ? Object.fromEntries(policy.seen) : null })
  beforeEach(() => policy.begin())
  afterEach(() => check(policy))
  afterAll(() => writeFileSync(FOUND, JSON.stringify(found())))
}

module.exports = { ASKED, FOUND, check, connect, prepare }
