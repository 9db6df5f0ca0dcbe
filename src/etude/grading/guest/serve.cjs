// The tested process: it loads modules of the package for the verifier, and does with them what the verifier asks.
//
// It holds the agent's tree and nothing of the tests: no text, no name, no expectation.
'use strict'

const { Membrane } = require('./membrane.cjs')
const { trusting } = require('./policy.cjs')

// `load(path)` gives a CommonJS module, `loadModule(path)` the promise of an ES module.
function serve (load, loadModule) {
  const root = process.cwd()
  const verifier = new Membrane({
    fd: 4,
    first: 0,
    policy: trusting,
    deadline: Infinity,
    gone: () => process.exit(0),
    keeps: false,
    load (path, module, nested) {
      if (!module) return load(`${root}/${path}`)
      if (nested) throw new Error('a module cannot be loaded in a call back')
      return Promise.resolve(loadModule(`${root}/${path}`))
    }
  })
  process.on('uncaughtException', (error) => verifier.tell({ x: 1, ...verifier.encoded(error) }))
  return verifier
}

module.exports = { serve }

if (require.main === module) {
  const { createRequire } = require('node:module')
  const { pathToFileURL } = require('node:url')
  const verifier = serve(createRequire(`${process.cwd()}/`), (path) => import(pathToFileURL(path)))
  process.on('beforeExit', () => verifier.idle())
  verifier.idle()
}
