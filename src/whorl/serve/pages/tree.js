// A conversation as a tree of messages. Editing a message or regenerating a response adds a sibling, so no message is lost,
// and arrow buttons switch between siblings. The shown and sent conversation is one path: from the root along the active child
// of each node.

export class MessageTree {
  constructor() {
    this.root = { id: 0, role: "root", text: "", parent: null, children: [], activeChild: -1 };
    this.lastId = 0;
  }

  /** Adds a message below `parent` and activates it. */
  add(parent, role, text) {
    const node = { id: ++this.lastId, role, text, parent, children: [], activeChild: -1 };
    parent.activeChild = parent.children.push(node) - 1;
    return node;
  }

  /** The messages shown, first to last. */
  path() {
    const nodes = [];
    for (let node = this.root.children[this.root.activeChild]; node; node = node.children[node.activeChild]) nodes.push(node);
    return nodes;
  }

  /** The last message shown, or the root. */
  leaf() {
    return this.path().at(-1) ?? this.root;
  }

  /** [{role, content}] from the first message to `node`. */
  messages(node) {
    const list = [];
    for (let at = node; at !== this.root; at = at.parent) list.unshift({ role: at.role, content: at.text });
    return list;
  }

  /** Activates the sibling at offset `by`; no effect if it does not exist. */
  selectSibling(node, by) {
    const { parent } = node;
    const to = parent.children.indexOf(node) + by;
    if (parent.children[to]) parent.activeChild = to;
  }

  /** Removes a message and its descendants; a neighbor becomes active. */
  remove(node) {
    const { parent } = node;
    parent.children.splice(parent.children.indexOf(node), 1);
    parent.activeChild = Math.min(parent.activeChild, parent.children.length - 1);
  }

  /** The tree as nested arrays [role, text, children, activeChild, feedback, sources], for a reload of the page. */
  pack(node = this.root) {
    return [node.role, node.text, node.children.map((child) => this.pack(child)), node.activeChild, node.feedback ?? null, node.sources ?? null];
  }

  /** The inverse of `pack`; an empty tree for invalid data. */
  static unpack(packed) {
    const tree = new MessageTree();
    const fill = (node, [, , children, activeChild, feedback, sources]) => {
      if (Array.isArray(sources)) node.sources = sources;
      if (feedback?.token) node.feedback = feedback;
      for (const child of children) fill(tree.add(node, String(child[0]), String(child[1])), child);
      if (node.children[activeChild]) node.activeChild = activeChild;
    };
    try {
      fill(tree.root, packed);
    } catch {
      return new MessageTree();
    }
    return tree;
  }
}
