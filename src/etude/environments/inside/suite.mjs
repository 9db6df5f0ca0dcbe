// Runs one JavaScript test file under its framework: node:test (which reports through report.mjs), mocha or tape.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { config, end, record, said } from './report.mjs'

const url = pathToFileURL(config.file)
const load = createRequire(url)

if (config.framework === 'mocha') {
  const Mocha = load('mocha')
  const mocha = new Mocha({ ui: config.ui, reporter: class {} })
  for (const name of config.requires) load(name)
  mocha.addFile(config.file)
  await mocha.loadFilesAsync()
  const name = (test) => test.titlePath().join(' > ')
  mocha.run()
    .on('pass', (test) => record(name(test), 'passed', ''))
    .on('fail', (test, error) => record(name(test), 'failed', said(error)))
    .on('pending', (test) => record(name(test), 'skipped', ''))
    .on('end', end)
} else if (config.framework === 'tape') {
  const tests = { __proto__: null }
  const tape = load('tape')
  tape.createStream({ objectMode: true })
    .on('data', (row) => {
      if (row.type === 'test') {
        const parent = tests[row.parent]
        tests[row.id] = { __proto__: null, name: parent ? `${parent.name} > ${row.name}` : row.name, skip: row.skip, wrong: null }
      } else if (row.type === 'assert' && !row.ok && !row.todo && !row.skip) {
        tests[row.test].wrong ??= `${row.operator}: ${row.name}`
      } else if (row.type === 'end' && tests[row.test]) {
        const { name, skip, wrong } = tests[row.test]
        record(name, skip ? 'skipped' : wrong === null ? 'passed' : 'failed', wrong ?? '')
      }
    })
    .on('end', end)
  await import(url)
} else {
  await import(url)
}
