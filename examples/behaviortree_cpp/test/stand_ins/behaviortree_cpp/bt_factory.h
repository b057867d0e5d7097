// Stand-in for BehaviorTree.CPP 4: the few names that the nodes use, so that a compiler can check
// them against the generated interfaces where Nav2 is not installed. Nothing here runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace BT
{
enum class NodeStatus { IDLE, RUNNING, SUCCESS, FAILURE };
struct NodeConfig {};
using NodeConfiguration = NodeConfig;
struct PortInfo {};
using PortsList = std::unordered_map<std::string, PortInfo>;

template<class T>
std::pair<std::string, PortInfo> InputPort(const std::string & name, const std::string &)
{
  return {name, {}};
}

template<class T>
std::pair<std::string, PortInfo> OutputPort(const std::string & name, const std::string &)
{
  return {name, {}};
}

class TreeNode
{
public:
  virtual ~TreeNode() = default;
  template<class T>
  bool getInput(const std::string &, T &) const {return false;}
  template<class T>
  void setOutput(const std::string &, const T &) {}
};

using NodeBuilder = std::function<std::unique_ptr<TreeNode>(
  const std::string &, const NodeConfig &)>;

class BehaviorTreeFactory
{
public:
  template<class T>
  void registerBuilder(const std::string &, const NodeBuilder &) {T::providedPorts();}
};
}  // namespace BT

#define BT_REGISTER_NODES(factory) \
  extern "C" void BT_RegisterNodesFromPlugin(BT::BehaviorTreeFactory & factory)
