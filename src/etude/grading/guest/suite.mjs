// Runs one JavaScript or TypeScript test file under its framework, and is the reporter that node:test loads.
//
// In the verifier (`config.verify`) the package's modules are stubs of another process, and nothing of that process runs
// here. Otherwise tested code shares this process: then it can find every object of this file, so results count only
// beside sentinels and negative controls. Every record carries the next of a list of one-time words that came in on a
// pipe. This module exports nothing but a reporter that can be used once, by node:test, before a test file is loaded.
//
// node:test, mocha and tape load TypeScript with tsx, if it was imported before; jest and vitest transform it as the
// repository's configuration says. Only what decides which tests run, and where results go, is set here.
import { existsSync, readFileSync, writeFileSync, writeSync } from 'node:fs'
import { createRequire } from 'node:module'
import { basename, relative, resolve } from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'

const LOADING = 'loading of the test file'
const MESSAGE = 300 // characters; the owner keeps no more
const { words, wanted, verify, ...config } = JSON.parse(readFileSync(0, 'utf8'))
const known = { __proto__: null }
for (const test of wanted ?? []) known[test] = true
const times = { __proto__: null }
const stringify = JSON.stringify
const text = String
const slice = Function.prototype.call.bind(String.prototype.slice)
const exit = process.exit.bind(process)
const { Buffer } = process.getBuiltinModule('buffer')
const own = createRequire(import.meta.url)
const url = pathToFileURL(config.file)
const load = createRequire(url)
const frames = new RegExp(`${basename(config.file).replaceAll('.', '[.]')}:(\\d+):\\d+`, 'g')
const runners = { __proto__: null, jest, mocha, node, tape, vitest }
let count = 0
let started // by node:test

const { ASKED, FOUND, check, connect } = verify ? own('./remote.cjs') : {}
const apart = config.framework === 'jest' || config.framework === 'vitest' // where tests run in a realm or thread of their own
const library = verify && !apart ? connect(verify, config.file) : null
if (verify && apart) writeFileSync(ASKED, stringify({ verify, file: config.file }))
runners[config.framework]().catch((error) => leave(0, error?.stack ?? error))

function record (test, outcome, message, line = 0) {
  times[test] = (times[test] ?? 0) + 1
  const id = times[test] > 1 ? `${test} #${times[test]}` : test
  if (wanted !== null && known[id] !== true) return
  if (outcome === 'passed' && library?.fatal) [outcome, message] = ['failed', library.fatal]
  say({ __proto__: null, test: id, outcome, message: slice(message, 0, MESSAGE), line })
}

function recorded (name) {
  const wrong = library?.current
  record(name, wrong ? 'failed' : 'passed', wrong ?? '')
}

function say (row) {
  const data = Buffer.from(`${words[count++]} ${stringify(row)}\n`)
  for (let done = 0; done < data.length;) done += writeSync(3, data, done)
}

function end () {
  if (library?.known === null) say({ __proto__: null, kinds: Object.fromEntries(library.seen) })
  say({ __proto__: null, end: true })
}

// What a realm or thread of its own found, once its tests have ended: the verdict on all of them.
function settled () {
  if (!verify) return ''
  const { fatal, kinds } = JSON.parse(readFileSync(FOUND, 'utf8'))
  if (kinds !== null) say({ __proto__: null, kinds })
  return fatal
}

// For runners that keep the process alive. A file without tests did not load: `why` is for people, and no end is said.
function leave (tests, why) {
  if (tests) end()
  else writeSync(2, `${why}\n`)
  exit(tests ? 0 : 1)
}

function said (error) {
  try {
    const line = text(error?.cause?.message ?? error?.message ?? error)
    return `${text(error?.cause?.name ?? error?.name ?? 'Error')}: ${line}`
  } catch {
    return 'Error'
  }
}

// The line at which an error left a test: of the outermost frame of the test file.
function place (stack) {
  let line = 0
  for (const [, at] of text(stack ?? '').matchAll(frames)) line = +at
  return line
}

function placed (error) {
  try {
    return place(error?.cause?.stack ?? error?.stack)
  } catch {
    return 0
  }
}

export default async function * (events) {
  if (started === undefined) return
  const begin = started
  started = undefined
  begin()
  const names = []
  for await (const { type, data } of events) {
    if (type === 'test:start') names[data.nesting] = data.name
    if ((type !== 'test:pass' && type !== 'test:fail') || data.details?.type === 'suite') continue
    let name = ''
    for (let i = 0; i < data.nesting; i++) name += `${names[i]} > `
    const skipped = data.skip !== undefined || data.todo !== undefined
    const outcome = skipped ? 'skipped' : type === 'test:pass' ? 'passed' : 'failed'
    record(name + data.name, outcome, type === 'test:pass' ? '' : said(data.details?.error), placed(data.details?.error))
  }
  end()
}

async function node () { // whose reporter is above; it is loaded before the test file
  const begun = new Promise((resolve) => { started = resolve })
  const { beforeEach, afterEach } = await import('node:test')
  beforeEach(() => library?.begin())
  if (library) afterEach(() => check(library))
  await begun
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
    .on('test', () => library?.begin())
    .on('test end', () => library?.finish())
    .on('pass', (test) => recorded(name(test)))
    .on('fail', (test, error) => record(name(test), 'failed', said(error), placed(error)))
    .on('pending', (test) => record(name(test), 'skipped', ''))
    .on('end', end)
}

async function tape () {
  const tests = { __proto__: null }
  const tape = load('tape')
  tape.createStream({ objectMode: true })
    .on('data', (row) => {
      if (row.type === 'test') {
        library?.begin()
        const parent = tests[row.parent]
        tests[row.id] = { __proto__: null, name: parent ? `${parent.name} > ${row.name}` : row.name, skip: row.skip, wrong: null, line: 0 }
      } else if (row.type === 'assert' && !row.ok && !row.todo && !row.skip) {
        tests[row.test].line ||= place(`${row.file}:${row.line}:1`)
        tests[row.test].wrong ??= `${row.operator}: ${row.name}`
      } else if (row.type === 'end' && tests[row.test]) {
        const { name, skip, wrong, line } = tests[row.test]
        const found = library?.finish() || wrong
        if (name === LOADING) return
        record(name, skip ? 'skipped' : found === null ? 'passed' : 'failed', found ?? '', line)
      }
    })
    .on('end', end)
  // The stream ends when it finds no test, so the file is loaded in one.
  tape(LOADING, (t) => { import(url).then(() => t.end(), (error) => leave(0, error?.stack ?? error)) })
}

// One file, in this process: workers cost more than they save. A file that did not load has no tests: no end is said.
async function jest () {
  const { config: own } = await load('jest-config').readInitialOptions(undefined, { skipMultipleConfigError: true })
  const { testRegex, coverageThreshold, ...kept } = transpiling(own)
  const set = { ...kept, testMatch: ['**/*'], reporters: [], collectCoverage: false, cacheDirectory: '/tmp/jest' }
  if (verify) set.setupFilesAfterEnv = [fileURLToPath(new URL('setup_jest.cjs', import.meta.url)), ...(kept.setupFilesAfterEnv ?? [])]
  if (config.conditions.length) set.testEnvironmentOptions = { ...kept.testEnvironmentOptions, customExportConditions: [...config.conditions, 'node', 'node-addons'] }
  const argv = { config: JSON.stringify(set), runTestsByPath: true, runInBand: true, watchman: false, silent: true, _: [config.file], $0: '' }
  const { results } = await load('@jest/core').runCLI(argv, [process.cwd()])
  const found = results.testResults[0]?.testResults ?? []
  const outcomes = { __proto__: null, passed: 'passed', failed: 'failed' }
  const fatal = found.length ? settled() : ''
  for (const { ancestorTitles, title, status, failureMessages } of found) {
    const outcome = fatal ? 'failed' : outcomes[status] ?? 'skipped'
    record([...ancestorTitles, title].join(' > '), outcome, failureMessages[0] ?? fatal, place(failureMessages[0]))
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
    maxWorkers: 1, fileParallelism: false, ...(config.channel ? { pool: 'threads' } : {}),
    ...(verify ? { setupFiles: [fileURLToPath(new URL('setup_vitest.mjs', import.meta.url))] } : {})
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
      const outcome = mode === 'skip' || mode === 'todo' ? 'skipped' : fatal ? 'failed' : outcomes[result?.state] ?? 'skipped'
      record(prefix + name, outcome, outcome === 'failed' ? fatal || said(result.errors?.[0]) : '', placed(result?.errors?.[0]))
    }
  }
  const files = started.state.getFiles()
  const fatal = files.some(({ tasks }) => tasks.length) ? settled() : ''
  for (const file of files) visit(file.tasks, '')
  leave(count > 0, files[0]?.result?.errors?.[0]?.message)
}
