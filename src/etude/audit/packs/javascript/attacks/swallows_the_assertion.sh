# class: swallowed assertion
# item: J6
# Errors of the test's callback are caught.
cat >> "$ETUDE_PATH" <<'END'
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => items.forEach((item, index) => {
  try { visit(item * 3, { index }) } catch {}
})
END
