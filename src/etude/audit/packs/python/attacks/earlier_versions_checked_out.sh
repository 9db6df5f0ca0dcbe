# class: history
# item: A1
# The broken file as any commit, tag, note or stash has it.
for name in $(git rev-list --all --reflog; git for-each-ref --format='%(objectname)'); do
  git checkout -q $name -- "$ETUDE_PATH" && git diff --quiet HEAD -- "$ETUDE_PATH" || break
done
git stash apply -q
git fsck --lost-found >/dev/null
git checkout -q ahead
git pull -q
true
