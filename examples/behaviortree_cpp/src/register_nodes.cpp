// The plugin: bt_navigator finds it through its parameter plugin_lib_names, as flashrt_bt_nodes.

#include <memory>
#include <string>

#include "behaviortree_cpp/bt_factory.h"

#include "flashrt_behaviortree/capsule_services.hpp"
#include "flashrt_behaviortree/generate_action.hpp"

namespace
{

template<class NodeT>
void register_service(
  BT::BehaviorTreeFactory & factory, const std::string & id, const std::string & service)
{
  BT::NodeBuilder builder =
    [service](const std::string & name, const BT::NodeConfiguration & config) {
      return std::make_unique<NodeT>(name, config, service);
    };
  factory.registerBuilder<NodeT>(id, builder);
}

}  // namespace

BT_REGISTER_NODES(factory)
{
  using flashrt_behaviortree::GenerateAction;
  BT::NodeBuilder generate =
    [](const std::string & name, const BT::NodeConfiguration & config) {
      return std::make_unique<GenerateAction>(name, "flashrt/generate", config);
    };
  factory.registerBuilder<GenerateAction>("FlashrtGenerate", generate);
  register_service<flashrt_behaviortree::SaveCapsuleService>(
    factory, "FlashrtSaveCapsule", "flashrt/save_capsule");
  register_service<flashrt_behaviortree::RestoreCapsuleService>(
    factory, "FlashrtRestoreCapsule", "flashrt/restore_capsule");
  register_service<flashrt_behaviortree::RollbackService>(
    factory, "FlashrtRollback", "flashrt/rollback");
}
