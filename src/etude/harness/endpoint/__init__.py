"""Where outside agents find their model: OpenAI's and Anthropic's routes over the token ledgers of episodes."""
