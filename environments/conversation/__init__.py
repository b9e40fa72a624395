"""The parts of a conversation that the agent loop works with: answers of model servers, arguments of tool calls, the size of the context."""
