import assert from 'node:assert/strict'
import { EventEmitter } from 'node:events'
import test from 'node:test'
import { Peg, grouped, numeric, repeated, sum, told } from '../lib/pegs.js'

test('moved', () => {
  assert.deepEqual(new Peg(1, 2).moved(3, 4), new Peg(4, 6))
})
test('moved has a row', () => {
  assert.equal(new Peg(1, 2).moved(0, 7).column, 9)
})
test('moved back', () => {
  assert.ok(new Peg(5, 5).moved(-2, -5).equals(new Peg(3, 0)))
  assert.ok(!new Peg(5, 5).moved(1, 1).equals(new Peg(5, 5)))
})
test('equals', () => {
  assert.equal(new Peg(2, 3).equals(new Peg(2, 3)), true)
  assert.equal(new Peg(2, 3).equals(new Peg(3, 2)), false)
})
test('equals in a row', () => {
  assert.equal(new Peg(2, 3).equals(new Peg(2, 4)), false)
})
test('repeated', () => {
  const items = ['a', 'b']
  assert.deepEqual(repeated(items, 2), items.flatMap((item) => [item, item]))
})
test('repeated never', () => {
  const items = [1, 2]
  assert.deepEqual(repeated(items, 1), [...items])
})
test('repeated twice', () => {
  const items = [[7], [8]]
  assert.deepEqual(repeated(items, 2), [items[0], items[0], items[1], items[1]].filter(Boolean))
})
test('grouped', () => {
  assert.deepEqual(grouped([1, 2, 3], (n) => n % 2), new Map([[1, [1, 3]], [0, [2]]]))
})
test('grouped texts', () => {
  assert.deepEqual([...grouped(['a', 'bb', 'c'], (text) => text.length).keys()], [1, 2])
})
test('grouped nothing', () => {
  assert.equal(grouped([], () => 1).size, 0)
})
test('told', async () => {
  const emitter = new EventEmitter()
  const seen = []
  emitter.on('item', (item) => seen.push(item))
  assert.equal(await told(emitter, ['x', 'y']), 2)
  assert.deepEqual(seen, ['x', 'y'])
})
test('told in order', async () => {
  const emitter = new EventEmitter()
  const seen = []
  emitter.on('item', (item) => seen.push(item * 2))
  await told(emitter, [3, 1])
  assert.deepEqual(seen, [6, 2])
})
test('numeric', () => {
  const object = { a: 1, b: 'x', c: 2 }
  assert.deepEqual(numeric(object), { a: 1, c: 2 })
})
test('numeric of numbers', () => {
  const object = { d: 4, e: 5 }
  assert.deepEqual(numeric(object), { ...object })
})
test('sum', () => {
  assert.equal(sum('3 and -1 and 5'), 7)
})
test('sum of one', () => {
  assert.equal(sum('x12'), 12)
})
test('sum of none', () => {
  assert.throws(() => sum('none'), RangeError)
})
