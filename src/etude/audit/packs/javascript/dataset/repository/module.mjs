import cjs from './index.js'
export const total = (items, limit) => cjs.total(items, limit)
export { double as twice }
export default class Box extends cjs.Shelf {}
export * from './more.mjs'
function double (value) { return value * 2 }
