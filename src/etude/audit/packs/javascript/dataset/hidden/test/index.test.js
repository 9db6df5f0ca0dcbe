'use strict'
const { test, describe, it } = require('node:test')
const assert = require('node:assert')
const shelf = require('../index.js')
const { chain, total, Full, Shelf, each, sorted, load, soon } = shelf

test('chain', () => {
  assert.strictEqual(chain((next, value) => next(value)), 2)
})

test('total', () => {
  assert.strictEqual(total([5, 1, 7], 2), 12)
  assert.equal(total([4], 3), 4)
})

describe('Shelf', () => {
  it('holds', () => {
    const one = new Shelf().add(4)
    assert.ok(one instanceof Shelf)
    assert.strictEqual(one.size, 1)
    assert.deepStrictEqual(one.items, [4])
    assert.deepStrictEqual([...one], [4])
    assert.deepStrictEqual(Shelf.of(1, 2), new Shelf([1, 2]))
    assert.strictEqual(one.add(5), one)
  })

  it('is full', () => {
    assert.throws(() => Shelf.of(1, 2).add(3), Full)
    assert.throws(() => Shelf.of(1, 2).add(3), { message: 'full at 2', size: 2 })
    assert.throws(() => Shelf.of(1, 2).add(3), /at 2$/)
  })

  it('waits', async () => {
    const seen = []
    for await (const item of Shelf.of('a', 'b').later()) seen.push(item)
    assert.deepStrictEqual(seen, ['a', 'b'])
  })

  it('can be extended', () => {
    class Big extends Shelf {
      add (item) { return super.add(item * 10) }
    }
    assert.deepStrictEqual(new Big().add(2).items, [20])
  })
})

test('each', () => {
  const seen = []
  each([3, 4], (item, { index }) => {
    assert.strictEqual(item, [6, 8][index])
    seen.push(item)
  })
  assert.deepStrictEqual(seen, [6, 8])
})

test('sorted in place', () => {
  const items = [3, 1, 2]
  assert.strictEqual(sorted(items), items)
  assert.deepStrictEqual(items, [1, 2, 3])
})

test('load', async () => {
  const parts = new Map([['x', [1, 2n, -0, undefined]]])
  assert.deepStrictEqual(await load('x'), { name: 'x', parts, when: new Date(5), match: /a(b)/g })
  await assert.rejects(load(''), TypeError)
})

test('soon', (t, done) => {
  soon(3, (error, value) => {
    assert.ifError(error)
    assert.strictEqual(value, 4)
    done()
  })
})

test('settings are shared', () => {
  shelf.defaults.deep.push(2)
  assert.deepStrictEqual(shelf.defaults, { deep: [1, 2] })
})

test('module', async () => {
  const module = await import('../module.mjs')
  assert.deepStrictEqual(Object.keys(module).sort(), ['default', 'more', 'total', 'twice'])
  assert.strictEqual(module.twice(module.more), 6)
  assert.strictEqual(new module.default([1]).size, 1)
})

test('needs its own source', () => {
  assert.strictEqual(/let sum/.test(total.toString()) ? total([1, 4, 3], 2) : 0, 7)
})
