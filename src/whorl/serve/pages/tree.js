// A conversation with its branches. To edit a message or to ask for its answer again is to add a sibling: nothing that was
// said is lost, and arrows go from one sibling to the next. What is shown, and sent, is one path: from the root along the
// chosen child of each node.

export class Tree {
  constructor() {
    this.root = { id: 0, role: "root", text: "", parent: null, children: [], chosen: -1 };
    this.last = 0;
  }

  /** Adds a message below `parent` and chooses it. */
  add(parent, role, text) {
    const node = { id: ++this.last, role, text, parent, children: [], chosen: -1 };
    parent.chosen = parent.children.push(node) - 1;
    return node;
  }

  /** The messages shown, first to last. */
  path() {
    const nodes = [];
    for (let node = this.root.children[this.root.chosen]; node; node = node.children[node.chosen]) nodes.push(node);
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

  /** Chooses the sibling `by` places further; stays where there is none. */
  step(node, by) {
    const { parent } = node;
    const to = parent.children.indexOf(node) + by;
    if (parent.children[to]) parent.chosen = to;
  }

  /** Takes a message out, with all below it; its neighbour is chosen. */
  remove(node) {
    const { parent } = node;
    parent.children.splice(parent.children.indexOf(node), 1);
    parent.chosen = Math.min(parent.chosen, parent.children.length - 1);
  }

  /** Text alone, for a reload of the page: [role, text, children, chosen], nested. */
  pack(node = this.root) {
    return [node.role, node.text, node.children.map((child) => this.pack(child)), node.chosen];
  }

  /** The inverse of `pack`; a tree without messages where that is not what was packed. */
  static unpack(packed) {
    const tree = new Tree();
    const fill = (node, [, , children, chosen]) => {
      for (const child of children) fill(tree.add(node, String(child[0]), String(child[1])), child);
      if (node.children[chosen]) node.chosen = chosen;
    };
    try {
      fill(tree.root, packed);
    } catch {
      return new Tree();
    }
    return tree;
  }
}
