// Runs one JavaScript or TypeScript test file under its framework and reports through report.mjs.
//
// node:test, mocha and tape load TypeScript with tsx, if it was imported before; jest and vitest transform it as the
// repository's configuration says. Only what decides which tests run, and where results go, is set here.
import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import { relative, resolve } from 'node:path'
import { pathToFileURL } from 'node:url'
import { config, end, leave, record, said } from './report.mjs'

const url = pathToFileURL(config.file)
const load = createRequire(url)
const runners = { __proto__: null, jest, mocha, node, tape, vitest }

await runners[config.framework]()

async function node () { // which reports by itself: report.mjs is its reporter
  await import(url)
}

async function mocha () {
  const loaded = load('mocha')
  const Mocha = loaded.default ?? loaded
  const mocha = new Mocha({ ui: config.ui, reporter: class {}, timeout: 10_000 })
  mocha.addFile(config.file)
  await mocha.loadFilesAsync()
  const name = (test) => test.titlePath().join(' > ')
  mocha.run()
    .on('pass', (test) => record(name(test), 'passed', ''))
    .on('fail', (test, error) => record(name(test), 'failed', said(error)))
    .on('pending', (test) => record(name(test), 'skipped', ''))
    .on('end', end)
}

async function tape () {
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
}

// One file, in this process: workers cost more than they save. A file that did not load has no tests: no end is said.
async function jest () {
  const { config: own } = await load('jest-config').readInitialOptions(undefined, { skipMultipleConfigError: true })
  const { testRegex, coverageThreshold, ...kept } = transpiling(own)
  const set = { ...kept, testMatch: ['**/*'], reporters: [], collectCoverage: false, cacheDirectory: '/tmp/jest' }
  if (config.conditions.length) set.testEnvironmentOptions = { ...kept.testEnvironmentOptions, customExportConditions: [...config.conditions, 'node', 'node-addons'] }
  const argv = { config: JSON.stringify(set), runTestsByPath: true, runInBand: true, watchman: false, silent: true, _: [config.file], $0: '' }
  const { results } = await load('@jest/core').runCLI(argv, [process.cwd()])
  const found = results.testResults[0]?.testResults ?? []
  const outcomes = { __proto__: null, passed: 'passed', failed: 'failed' }
  for (const { ancestorTitles, title, status, failureMessages } of found) {
    record([...ancestorTitles, title].join(' > '), outcomes[status] ?? 'skipped', failureMessages[0] ?? '')
  }
  leave(found.length > 0, results.testResults[0]?.failureMessage)
}

// What ts-jest thinks of types decides no test; a tsconfig that a release left out is left out.
function transpiling (own) {
  const plain = { diagnostics: false, isolatedModules: true }
  const transform = { ...own.transform }
  for (const [pattern, how] of Object.entries(transform)) {
    const [name, options] = Array.isArray(how) ? how : [how, {}]
    if (!name.includes('ts-jest')) continue
    const { tsconfig, ...rest } = options
    const there = typeof tsconfig !== 'string' || existsSync(resolve(tsconfig.replace('<rootDir>', '.')))
    transform[pattern] = [name, { ...rest, ...plain, ...(there && tsconfig !== undefined ? { tsconfig } : {}) }]
  }
  const preset = own.preset?.includes('ts-jest') ? { globals: { ...own.globals, 'ts-jest': { ...own.globals?.['ts-jest'], ...plain } } } : {}
  return own.transform ? { ...own, transform } : { ...own, ...preset }
}

async function vitest () {
  const { startVitest } = await import(pathToFileURL(load.resolve('vitest/node')))
  const options = {
    root: process.cwd(), watch: false, include: [relative(process.cwd(), config.file)], exclude: [], globals: true,
    cache: false, reporters: [{}], coverage: { enabled: false }, typecheck: { enabled: false }, configLoader: 'runner',
    maxWorkers: 1, fileParallelism: false
  }
  const conditions = config.conditions.length ? { conditions: [...config.conditions, 'module', 'node', 'development|production'] } : {}
  const vite = { cacheDir: '/tmp/vite', configLoader: 'runner', logLevel: 'silent', resolve: conditions, ssr: { resolve: conditions } }
  const started = await startVitest('test', [config.file], options, vite)
  let count = 0
  const outcomes = { __proto__: null, pass: 'passed', fail: 'failed' }
  const visit = (tasks, prefix) => {
    for (const { name, tasks: inner, result, mode } of tasks) {
      if (inner) {
        visit(inner, `${prefix}${name} > `)
        continue
      }
      count++
      const outcome = mode === 'skip' || mode === 'todo' ? 'skipped' : outcomes[result?.state] ?? 'skipped'
      record(prefix + name, outcome, outcome === 'failed' ? said(result.errors?.[0]) : '')
    }
  }
  const files = started.state.getFiles()
  for (const file of files) visit(file.tasks, '')
  leave(count > 0, files[0]?.result?.errors?.[0]?.message)
}
